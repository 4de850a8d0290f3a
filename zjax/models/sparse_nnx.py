"""Sparse self-attention as an NNX module."""

from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax_kernels import SparsityConfig


class SparseSelfAttention(nnx.Module):
    """Block-sparse self-attention without parameters; replaces DeepSpeed's module.

    Args:
        sparsity_config: Pattern of `zjax_kernels`, such as `BigBird(num_heads=4)`, or
            your array as `Custom(num_heads=4, live=...)`.
        key_padding_mask_mode: `add` masks by -10000.0 and keeps by 0.0, `mul` by 0 and
            1.
        attn_mask_mode: `add` or `mul`, with the same meaning for `attn_mask`.
        max_seq_length: Tokens of the layout, 1 or more; shorter sequences use its first
            blocks, and need not be whole blocks.

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
        self.attn_mask_mode: Mode = attn_mask_mode

    def __call__(
        self,
        query: Float[Array, "B S H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K D"],
        rpe: ArrayLike | None = None,
        key_padding_mask: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
    ) -> Float[Array, "B S H D"]:
        """Computes softmax(q k / sqrt(D)) v over the keys in live blocks.

        Args:
            query: [B, S, H, D] queries; H is that of the pattern.
            key: [B, S, K, D] keys; K divides H.
            value: [B, S, K, D] values.
            rpe: Relative position bias; refused.
            key_padding_mask: [B, S] or [B, 1, 1, S] mask of keys. If it is traced, a
                number that is neither 0 nor masks under `add` makes its row NaN.
            attn_mask: [S, S] mask of pairs, a concrete array such as NumPy's.

        Returns:
            [B, S, H, D], 0 where a query sees no key.

        Raises:
            NotImplementedError: `rpe` is given, or `attn_mask` is traced.
            ConfigError: A setting, a shape or a mask is unusable, or the sequence is
                longer than `max_seq_length`.
        """
        return self_attention(
            query,
            key,
            value,
            self.sparse,
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
        )
