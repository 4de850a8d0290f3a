"""Layers of zjax for NNX modules."""

from zjax.models.sparse_nnx import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
