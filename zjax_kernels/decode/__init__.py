"""Kernels of generation: attention to pages, products and experts of few rows."""

from zjax_kernels.decode.api import paged_attention
from zjax_kernels.decode.cache import write_pages
from zjax_kernels.decode.experts import (
    Choice,
    choose_experts,
    few_rows_experts,
    lay_router,
)
from zjax_kernels.decode.product import few_rows_matmul

__all__ = [
    "Choice",
    "choose_experts",
    "few_rows_experts",
    "few_rows_matmul",
    "lay_router",
    "paged_attention",
    "write_pages",
]
