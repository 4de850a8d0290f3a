"""Attention of few queries to a paged cache of keys and values, for generation."""

from zjax_kernels.decode.api import paged_attention
from zjax_kernels.decode.cache import write_pages

__all__ = ["paged_attention", "write_pages"]
