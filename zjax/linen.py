"""Layers of zjax for Linen modules."""

from zjax.models.linen_layers import MoE, SparseSelfAttention

__all__ = ["MoE", "SparseSelfAttention"]
