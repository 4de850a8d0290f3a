"""Kernels of block-sparse attention on Hopper GPUs."""

from zjax_kernels.sparse.mosaic_gpu.backward import backward_keys, backward_queries
from zjax_kernels.sparse.mosaic_gpu.forward import forward

__all__ = ["backward_keys", "backward_queries", "forward"]
