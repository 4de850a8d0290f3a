"""Layers of zjax for Linen modules."""

from zjax.models.sparse_linen import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
