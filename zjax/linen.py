"""Layers of zjax for Linen modules."""

from zjax.models.mixture_linen import MoE
from zjax.models.sparse_linen import SparseSelfAttention

__all__ = ["MoE", "SparseSelfAttention"]
