"""Rows that the kernels take; to read it imports no compiler of kernels."""

THREADS = 128
"""Of a warpgroup; the channels of a row are a multiple."""
MAX_CHANNELS = 32 * THREADS
"""Largest row whose values and sums fit in registers."""
