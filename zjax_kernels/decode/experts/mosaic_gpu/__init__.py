"""Kernels of experts of few rows, for Hopper GPUs."""

from zjax_kernels.decode.experts.mosaic_gpu.products import few_rows_experts
from zjax_kernels.decode.experts.mosaic_gpu.router import choose_experts

__all__ = ["choose_experts", "few_rows_experts"]
