"""Products of few rows with a matrix that is read once, at the speed of memory."""

from zjax_kernels.decode.product.api import few_rows_matmul

__all__ = ["few_rows_matmul"]
