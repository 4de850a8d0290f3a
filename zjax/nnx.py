"""Layers of zjax for NNX modules."""

from zjax.models.mixture_nnx import MoE
from zjax.models.sparse_nnx import SparseSelfAttention

__all__ = ["MoE", "SparseSelfAttention"]
