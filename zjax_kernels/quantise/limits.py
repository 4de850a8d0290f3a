"""Blocks that the kernel takes; to read it imports no compiler of kernels."""

BLOCKS_PER_STEP = 64
"""Blocks that a warpgroup holds in its registers."""
SIZES = (64, 128, 256)
"""Numbers of a block."""
