"""Matrix products of groups of rows, as of the experts of a mixture."""

from zjax_kernels.grouped.api import grouped_matmul, grouped_outer

__all__ = ["grouped_matmul", "grouped_outer"]
