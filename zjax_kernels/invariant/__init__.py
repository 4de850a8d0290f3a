"""Kernels of batch invariance: the bits of a row are the same beside any rows."""

from zjax_kernels.invariant.api import (
    has_attention,
    has_matmul,
    has_norm,
    matmul,
    packed_attention,
    paged_attention,
)

__all__ = [
    "has_attention",
    "has_matmul",
    "has_norm",
    "matmul",
    "packed_attention",
    "paged_attention",
]
