"""Kernel of products of few rows on Hopper GPUs."""

from zjax_kernels.decode.product.mosaic_gpu.kernel import few_rows_matmul

__all__ = ["few_rows_matmul"]
