"""Layers of zjax for NNX modules."""

from zjax.models.nnx_layers import MoE, SparseSelfAttention

__all__ = ["MoE", "SparseSelfAttention"]
