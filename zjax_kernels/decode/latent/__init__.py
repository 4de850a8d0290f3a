"""Paged attention over latents: values are the first channels of the keys."""
