"""Kernels of generation: attention to pages, few rows, filters of logits."""

from zjax_kernels.decode.api import paged_attention
from zjax_kernels.decode.cache import write_pages
from zjax_kernels.decode.experts import (
    Choice,
    choose_experts,
    few_rows_experts,
    lay_router,
)
from zjax_kernels.decode.filters import find_best, top_k_threshold, top_p_threshold
from zjax_kernels.decode.product import few_rows_matmul
from zjax_kernels.decode.rotate import rotate_and_write

__all__ = [
    "Choice",
    "choose_experts",
    "few_rows_experts",
    "few_rows_matmul",
    "find_best",
    "lay_router",
    "paged_attention",
    "rotate_and_write",
    "top_k_threshold",
    "top_p_threshold",
    "write_pages",
]
