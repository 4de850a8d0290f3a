"""DeepSpeed's sparse self-attention and its helpers, under their names, in JAX's order.

Sequences come before heads: [B, S, H, D]. A query that sees no key has 0, not NaN.

Reference: DeepSpeed, `ops/sparse_attention/sparse_self_attention.py` and
`sparse_attention_utils.py`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.core as jax_core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.ops.sparse import Sparse, sparse_attention

Mode = Literal["add", "mul"]
MASKS = -9_000.0
"""An added number from here down masks; -10000 is -9984 in bfloat16."""


def self_attention(
    query: Float[Array, "B S H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    sparse: Sparse,
    *,
    rpe: Any = None,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    key_padding_mask_mode: Mode = "add",
) -> Float[Array, "B S H D"]:
    """Attention with a key padding mask in either of DeepSpeed's forms.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        sparse: The pattern and its longest sequence.
        rpe: Refused.
        key_padding_mask: [B, S]. Under `mul`, 0 masks a key; under `add`, a number of
            -9000 or less does, and the others must be 0. What is neither makes NaN of
            the row where it cannot be told before the program runs.
        attn_mask: Refused.
        key_padding_mask_mode: What the numbers mean.

    Returns:
        One average per query and head.

    Raises:
        NotImplementedError: `rpe` or `attn_mask` is given.
        ValueError: The mask cannot be used, or the sequence is longer than the layout.

    Example:
        >>> from zjax_kernels import BigBird
        >>> x = jnp.ones((1, 100, 2, 8))
        >>> self_attention(x, x, x, Sparse(BigBird(2), 128)).shape
        (1, 100, 2, 8)
    """
    for name, given in (("rpe", rpe), ("attn_mask", attn_mask)):
        if given is not None:
            raise NotImplementedError(
                f"{name} of shape {jnp.shape(given)} cannot be added to the scores of "
                "blocks; put a mask into the layout, as zjax_kernels.BlockLayout."
                "from_dense reads it, or use jax.nn.dot_product_attention"
            )
    if key_padding_mask_mode not in ("add", "mul"):
        raise ValueError(
            f"key_padding_mask_mode={key_padding_mask_mode!r} is no mode; use add, mul"
        )
    if key_padding_mask is None:
        return sparse_attention(query, key, value, sparse)
    mask = jnp.asarray(key_padding_mask)
    if mask.shape != query.shape[:2]:
        raise ValueError(
            f"key_padding_mask.shape={mask.shape} is not {query.shape[:2]}; give one "
            "number per key"
        )
    if key_padding_mask_mode == "mul":
        return sparse_attention(query, key, value, sparse, key_mask=mask != 0)
    visible = mask > MASKS
    unclear = visible & (mask != 0)
    if not isinstance(unclear, jax_core.Tracer) and unclear.any():
        raise ValueError(
            f"key_padding_mask={mask[unclear][0]} neither masks a key nor leaves it; "
            "use 0 and -10000, or key_padding_mask_mode='mul'"
        )
    out = sparse_attention(query, key, value, sparse, key_mask=visible)
    return jnp.where(unclear.any(axis=1)[:, None, None, None], jnp.nan, out)


class Padded(NamedTuple):
    """Inputs of whole blocks, in DeepSpeed's order; those not given are None."""

    pad_len: int
    """Tokens that were added."""
    input_ids: Array | None
    attention_mask: Array | None
    """False on what was added."""
    token_type_ids: Array | None
    position_ids: Array | None
    inputs_embeds: Array | None


def pad_to_block_size(
    block_size: int,
    input_ids: Int[Array, "B S"] | None = None,
    attention_mask: Any = None,
    token_type_ids: Int[Array, "B S"] | None = None,
    position_ids: Int[Array, "B S"] | None = None,
    inputs_embeds: Float[Array, "B S M"] | None = None,
    *,
    pad_token_id: int = 0,
    model_embeddings: Callable[[Array], Array] | None = None,
) -> Padded:
    """Lengthens the inputs of a model to whole blocks.

    `SparseSelfAttention` needs no help with that; other layers may.

    Args:
        block_size: Tokens per block, 1 or more.
        input_ids: Padded with `pad_token_id`, like `position_ids`.
        attention_mask: [B, S], padded with False; all True where there is none.
        token_type_ids: Padded with 0.
        position_ids: Positions.
        inputs_embeds: Padded with the vector of `pad_token_id`, or with 0.
        pad_token_id: Id of padding.
        model_embeddings: Ids to vectors, for `inputs_embeds`.

    Returns:
        The number of tokens added, and the inputs.

    Raises:
        ValueError: Neither `input_ids` nor `inputs_embeds` is given.

    Example:
        >>> pad_to_block_size(4, jnp.ones((1, 5), jnp.int32)).attention_mask.tolist()
        [[True, True, True, True, True, False, False, False]]
    """
    some = inputs_embeds if input_ids is None else input_ids
    if some is None:
        raise ValueError("input_ids=None leaves nothing to pad; give ids or vectors")
    batch, length = some.shape[:2]
    pad_len = -length % block_size
    if attention_mask is None:
        attention_mask = jnp.ones((batch, length), bool)

    def pad(x, filler=0):
        if x is None:
            return None
        return jnp.pad(x, ((0, 0), (0, pad_len)), constant_values=filler)

    if inputs_embeds is not None:
        ids = jnp.full((batch, pad_len), pad_token_id, jnp.int32)
        added = jnp.zeros((batch, pad_len, inputs_embeds.shape[2]), inputs_embeds.dtype)
        added = added if model_embeddings is None else model_embeddings(ids)
        inputs_embeds = jnp.concatenate([inputs_embeds, added], axis=1)
    return Padded(
        pad_len,
        pad(input_ids, pad_token_id),
        pad(attention_mask, False),
        pad(token_type_ids),
        pad(position_ids, pad_token_id),
        inputs_embeds,
    )


def unpad_sequence_output(
    pad_len: int, sequence_output: Float[Array, "B S *dims"]
) -> Float[Array, "B T *dims"]:
    """Drops what `pad_to_block_size` added.

    Args:
        pad_len: Tokens that were added, 0 or more.
        sequence_output: What came out of the model.

    Returns:
        The first `S - pad_len` tokens.

    Example:
        >>> unpad_sequence_output(3, jnp.ones((1, 8, 2))).shape
        (1, 5, 2)
    """
    return sequence_output[:, : sequence_output.shape[1] - pad_len]


def extend_position_embedding(
    table: Float[Array, "N M"], max_position: int, *, num_reserved: int = 0
) -> Float[Array, "P M"]:
    """Repeats a table of learned positions, for a trained model to read longer texts.

    Args:
        table: One row per position, after the reserved ones.
        max_position: Positions to have, more than there are.
        num_reserved: First rows that stand for no position: 0 in BERT, 2 in RoBERTa.

    Returns:
        The reserved rows once, and the others again and again.

    Raises:
        ValueError: The table is long enough.

    Example:
        >>> table = jnp.array([[7.0], [8.0], [1.0], [2.0]])
        >>> extend_position_embedding(table, 5, num_reserved=2)[:, 0].tolist()
        [7.0, 8.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    """
    reserved, positions = table[:num_reserved], table[num_reserved:]
    if max_position <= len(positions):
        raise ValueError(
            f"max_position={max_position} is no more than the {len(positions)} of the "
            "table; leave the table as it is"
        )
    repeats = -(-max_position // len(positions))
    return jnp.concatenate([reserved, jnp.tile(positions, (repeats, 1))[:max_position]])
