"""Kernel of paged attention on Hopper GPUs."""

from zjax_kernels.decode.mosaic_gpu.kernel import paged_attention

__all__ = ["paged_attention"]
