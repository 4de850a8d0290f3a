"""Kernels of generation: attention to a paged cache, and products of few rows."""

from zjax_kernels.decode.api import paged_attention
from zjax_kernels.decode.cache import write_pages
from zjax_kernels.decode.product import few_rows_matmul

__all__ = ["few_rows_matmul", "paged_attention", "write_pages"]
