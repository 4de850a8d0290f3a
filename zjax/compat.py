"""Differences between JAX versions, found by probing. The only file that knows of them."""
