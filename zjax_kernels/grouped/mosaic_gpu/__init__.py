"""Kernels of grouped products on Hopper GPUs."""

from zjax_kernels.grouped.mosaic_gpu.activation import (
    grouped_activation,
    grouped_activation_backward,
    grouped_matmul,
)
from zjax_kernels.grouped.mosaic_gpu.outer import grouped_outer, grouped_sum
from zjax_kernels.grouped.mosaic_gpu.rows import copy_rows

__all__ = [
    "copy_rows",
    "grouped_activation",
    "grouped_activation_backward",
    "grouped_matmul",
    "grouped_outer",
    "grouped_sum",
]
