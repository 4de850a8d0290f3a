"""Sparse self-attention for a Linen module."""

import flax.linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax_kernels import SparsityConfig


class SparseSelfAttention(nn.Module):
    """Attention over live blocks, in place of DeepSpeed's module; without parameters.

    Args:
        sparsity_config: A pattern of `zjax_kernels`, such as `BigBird(num_heads=4)`, or
            an array of yours as `Custom(num_heads=4, live=...)`.
        key_padding_mask_mode: `add` has 0.0 and -10000.0, `mul` 1 and 0.
        attn_mask_mode: The same for `attn_mask`.
        max_seq_length: Tokens that the layout is made for, 1 or more; a shorter
            sequence has its first blocks, and need not be whole blocks.

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
        """Averages the values by softmax(q k / sqrt(D)) over the keys in live blocks.

        Args:
            query: [B, S, H, D] queries; H is that of the pattern.
            key: [B, S, K, D] keys; K divides H.
            value: [B, S, K, D] values.
            rpe: Refused: nothing is added to the scores of blocks.
            key_padding_mask: [B, S] or [B, 1, 1, S], which keys are seen in a row.
                What `add` can neither mask nor leave makes NaN of a row where it is
                known only while the program runs.
            attn_mask: [S, S], which keys each query sees; known before the program
                runs, such as a NumPy array.

        Returns:
            [B, S, H, D], one average per query and head, 0 where a query sees no key.

        Raises:
            NotImplementedError: `rpe` is given, or `attn_mask` is known only later.
            ConfigError: A setting, a shape or a mask cannot be used, or the sequence is
                longer than `max_seq_length`.
        """
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
