"""Kernels of batch invariance on Hopper GPUs."""

from zjax_kernels.invariant.mosaic_gpu.attention import (
    packed_attention,
    paged_attention,
)
from zjax_kernels.invariant.mosaic_gpu.partition import log_partition
from zjax_kernels.invariant.mosaic_gpu.product import matmul

__all__ = ["log_partition", "matmul", "packed_attention", "paged_attention"]
