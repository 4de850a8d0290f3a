"""Rotation of decoded tokens' queries and keys, and writes to the pages of a cache."""

from zjax_kernels.decode.rotate.api import rotate_and_write

__all__ = ["rotate_and_write"]
