"""Kernels of batch invariance: no bit of a row depends on another row."""

from zjax_kernels.invariant.api import (
    has_attention,
    has_log_partition,
    has_matmul,
    has_norm,
    log_partition,
    matmul,
    packed_attention,
    paged_attention,
)

__all__ = [
    "has_attention",
    "has_log_partition",
    "has_matmul",
    "has_norm",
    "log_partition",
    "matmul",
    "packed_attention",
    "paged_attention",
]
