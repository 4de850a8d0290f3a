"""Sparse self-attention as a Linen module."""

import flax.linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax_kernels import SparsityConfig


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention without parameters; replaces DeepSpeed's module.

    The arguments are those of `zjax.nnx.SparseSelfAttention`.

    Example:
        >>> import jax
        >>> from zjax_kernels import BigBird
        >>> x = jax.numpy.ones((1, 100, 4, 8))
        >>> SparseSelfAttention(BigBird(num_heads=4)).apply({}, x, x, x).shape
        (1, 100, 4, 8)

    Reference:
        DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
    """

    sparsity_config: SparsityConfig
    key_padding_mask_mode: Mode = "add"
    attn_mask_mode: Mode = "mul"
    max_seq_length: int = 2048

    def __call__(
        self,
        query: Float[Array, "B S H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K D"],
        rpe: ArrayLike | None = None,
        key_padding_mask: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
    ) -> Float[Array, "B S H D"]:
        """Attends as `zjax.nnx.SparseSelfAttention` does."""
        return self_attention(
            query,
            key,
            value,
            Sparse(self.sparsity_config, self.max_seq_length),
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
        )
