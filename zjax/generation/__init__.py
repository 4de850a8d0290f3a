"""Generation of texts for many requests at once, over a paged KV cache."""
