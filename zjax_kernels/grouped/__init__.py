"""Grouped matrix products: one matrix per group of rows, as in a mixture of experts."""

from zjax_kernels.grouped.api import (
    copy_rows,
    grouped_activation,
    grouped_activation_backward,
    grouped_matmul,
    grouped_outer,
    grouped_sum,
)
from zjax_kernels.grouped.search import tune_grouped_matmul

__all__ = [
    "copy_rows",
    "grouped_activation",
    "grouped_activation_backward",
    "grouped_matmul",
    "grouped_outer",
    "grouped_sum",
    "tune_grouped_matmul",
]
