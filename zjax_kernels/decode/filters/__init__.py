"""Filters of decoded tokens: thresholds of top-k and top-p, and the best tokens."""

from zjax_kernels.decode.filters.api import find_best, top_k_threshold, top_p_threshold
from zjax_kernels.decode.filters.reference import exact_sum

__all__ = ["exact_sum", "find_best", "top_k_threshold", "top_p_threshold"]
