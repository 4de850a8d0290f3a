"""Sparse self-attention for an NNX module."""

from flax import nnx
from jaxtyping import Array, Float

from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax_kernels import SparsityConfig


class SparseSelfAttention(nnx.Module):
    """Attention over live blocks, in place of DeepSpeed's module; without parameters.

    Args:
        sparsity_config: A pattern of `zjax_kernels`, such as `BigBird(num_heads=4)`.
        key_padding_mask_mode: `add` has 0 and -10000, `mul` 1 and 0.
        attn_mask_mode: Taken for DeepSpeed's sake; masks of scores are refused.
        max_seq_length: Tokens that the layout is made for, 1 or more; a shorter
            sequence has its first blocks, and need not be whole blocks.

    Example:
        >>> import jax
        >>> from zjax_kernels import BigBird
        >>> x = jax.numpy.ones((1, 100, 4, 8))
        >>> SparseSelfAttention(BigBird(num_heads=4))(x, x, x).shape
        (1, 100, 4, 8)

    Reference:
        DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: Mode = "add",
        attn_mask_mode: Mode = "mul",
        max_seq_length: int = 2048,
    ):
        self.sparse = Sparse(sparsity_config, max_seq_length)
        self.key_padding_mask_mode: Mode = key_padding_mask_mode

    def __call__(
        self,
        query: Float[Array, "B S H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K D"],
        rpe: Array | None = None,
        key_padding_mask: Array | None = None,
        attn_mask: Array | None = None,
    ) -> Float[Array, "B S H D"]:
        """Averages the values, as `zjax.ops.sparse_self.self_attention` says."""
        return self_attention(
            query,
            key,
            value,
            self.sparse,
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
        )
