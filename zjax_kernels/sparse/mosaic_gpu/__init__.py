"""Kernels of block-sparse attention on Hopper GPUs."""

from zjax_kernels.sparse.mosaic_gpu.forward import forward
from zjax_kernels.sparse.mosaic_gpu.keys import backward_keys
from zjax_kernels.sparse.mosaic_gpu.queries import backward_queries

__all__ = ["backward_keys", "backward_queries", "forward"]
