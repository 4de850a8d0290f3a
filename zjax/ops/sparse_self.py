"""DeepSpeed's sparse self-attention and padding helpers under DeepSpeed's names."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.ops.sparse import Sparse, sparse_attention
from zjax_kernels.sparse.arguments import integer_problems


class Padded(NamedTuple):
    """Padded inputs, in DeepSpeed's order; inputs not given are None."""

    pad_len: int
    input_ids: Array | None
    attention_mask: Array | None
    """False on padding."""
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
    """Pads the inputs of a model to a multiple of the block size.

    `SparseSelfAttention` pads by itself; other layers may need padded inputs.

    Args:
        block_size: Tokens per block, >= 1.
        input_ids: Token ids, padded with `pad_token_id`.
        attention_mask: Mask [B, S], padded with False; all True if None.
        token_type_ids: Segment types, padded with 0.
        position_ids: Positions, padded with `pad_token_id`.
        inputs_embeds: Embeddings, padded with the embedding of `pad_token_id` if
            `model_embeddings` is given, else with 0.
        pad_token_id: Id of padding, >= 0.
        model_embeddings: Function from ids to embeddings, for padding `inputs_embeds`.

    Returns:
        The number of tokens added, and the padded inputs.

    Raises:
        ConfigError: Neither `input_ids` nor `inputs_embeds` is given, inputs differ in
            batch or length, or a number is out of range.

    Example:
        >>> pad_to_block_size(4, jnp.ones((1, 5), jnp.int32)).attention_mask.tolist()
        [[True, True, True, True, True, False, False, False]]
    """
    _check_integer("block_size", block_size, 1)
    _check_integer("pad_token_id", pad_token_id, 0)
    batch, length = _common_shape(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        token_type_ids=token_type_ids,
        position_ids=position_ids,
    )
    pad_len = -length % block_size
    if attention_mask is None:
        attention_mask = jnp.ones((batch, length), bool)

    def pad(x, filler=0):
        if x is None:
            return None
        return jnp.pad(x, ((0, 0), (0, pad_len)), constant_values=filler)

    if inputs_embeds is not None:
        ids = jnp.full((batch, pad_len), pad_token_id, jnp.int32)
        inputs_embeds = _pad_embeddings(inputs_embeds, ids, model_embeddings)
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
    """Removes the last `pad_len` tokens, which `pad_to_block_size` added.

    Args:
        pad_len: Number of tokens added, from 0 to S - 1.
        sequence_output: Outputs of a model on the padded inputs.

    Returns:
        The outputs of the first S - `pad_len` tokens.

    Raises:
        ConfigError: `pad_len` is not below the number of tokens.

    Example:
        >>> unpad_sequence_output(3, jnp.ones((1, 8, 2))).shape
        (1, 5, 2)
    """
    _check_integer("pad_len", pad_len, 0)
    length = sequence_output.shape[1]
    if pad_len >= length:
        problem = f"is not below the {length} tokens of sequence_output"
        remedy = "give what pad_to_block_size returned"
        raise ConfigError(Problem("pad_len", pad_len, problem, remedy))
    return sequence_output[:, : length - pad_len]


def extend_position_embedding(
    table: Float[Array, "N M"], max_position: int, *, num_reserved: int = 0
) -> Float[Array, "P M"]:
    """Repeats a table of learned positions, so that a trained model reads longer texts.

    Args:
        table: Embeddings, the reserved rows and then one row per position.
        max_position: Number of positions of the result, more than the table has.
        num_reserved: Number of first rows that are not positions, from 0 to N - 1: 0 in
            BERT, 2 in RoBERTa.

    Returns:
        The reserved rows once, then the rows of positions repeated.

    Raises:
        ConfigError: The table is long enough already, or has no row to repeat.

    Example:
        >>> table = jnp.array([[7.0], [8.0], [1.0], [2.0]])
        >>> extend_position_embedding(table, 5, num_reserved=2)[:, 0].tolist()
        [7.0, 8.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    """
    _check_integer("num_reserved", num_reserved, 0)
    _check_integer("max_position", max_position, 1)
    if num_reserved >= len(table):
        problem = f"leaves no position of table.shape={table.shape}"
        remedy = "give fewer, or a table with rows after them"
        raise ConfigError(Problem("num_reserved", num_reserved, problem, remedy))
    reserved, positions = table[:num_reserved], table[num_reserved:]
    if max_position <= len(positions):
        problem = f"is no more than the {len(positions)} of the table"
        remedy = "leave the table as it is"
        raise ConfigError(Problem("max_position", max_position, problem, remedy))
    repeats = -(-max_position // len(positions))
    return jnp.concatenate([reserved, jnp.tile(positions, (repeats, 1))[:max_position]])


def _check_integer(name, value, least):
    """Refuses numbers that are no integers or below `least`."""
    if integer_problems(name, value, least):
        problem, remedy = f"is not an integer >= {least}", f"give {least} or more"
        raise ConfigError(Problem(name, value, problem, remedy))


def _common_shape(**inputs):
    """Finds batch and length, and refuses inputs that disagree."""
    shapes = {name: jnp.shape(x) for name, x in inputs.items() if x is not None}
    if not {"input_ids", "inputs_embeds"} & set(shapes):
        problem, remedy = "leaves nothing to pad", "give ids or vectors"
        raise ConfigError(Problem("input_ids", None, problem, remedy))
    first, *_ = shapes
    common = shapes[first][:2]
    for name, shape in shapes.items():
        dims = "batch, tokens, channels" if name == "inputs_embeds" else "batch, tokens"
        if len(shape) != len(dims.split()):
            problem, remedy = f"is not [{dims}]", "give one row for each text"
            raise ConfigError(Problem(f"{name}.shape", shape, problem, remedy))
        if shape[:2] != common:
            problem = f"differs from {common}, that of {first}"
            remedy = "give one for each token"
            raise ConfigError(Problem(f"{name}.shape", shape, problem, remedy))
    return common


def _pad_embeddings(vectors, ids, model_embeddings):
    """Appends the embeddings of padding, or zeros."""
    shape = *ids.shape, vectors.shape[2]
    if model_embeddings is None:
        added = jnp.zeros(shape, vectors.dtype)
    else:
        added = model_embeddings(ids).astype(vectors.dtype)
    if added.shape != shape:
        problem = f"is not {shape}, as inputs_embeds need"
        remedy = "return a vector for each id, as long as those"
        raise ConfigError(
            Problem("model_embeddings(ids).shape", added.shape, problem, remedy)
        )
    return jnp.concatenate([vectors, added], axis=1)


Mode = Literal["add", "mul"]
MASK_THRESHOLD = -9_000.0
"""Additive masks hide a key at this number or below; -10000 is -9984 in bfloat16."""


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
    attn_mask_mode: Mode = "mul",
) -> Float[Array, "B S H D"]:
    """Computes sparse attention with DeepSpeed's masks, multiplicative or additive.

    In mode `mul`, 0 masks. In mode `add`, -9000 or less masks, and every other number
    must be 0: in a traced `key_padding_mask` another number makes the row NaN. The mask
    of keys is [B, S] or [B, 1, 1, S], the mask of pairs a concrete [S, S]; `rpe` is
    refused.
    """
    _check_modes(key_padding_mask_mode, attn_mask_mode)
    _check_heads(query, key, value, sparse.pattern.num_heads)
    _check_scores(rpe, attn_mask)
    batch, length = query.shape[:2]
    masks: dict[str, Any] = {}
    invalid = None
    if attn_mask is not None:
        shape = length, length
        masks["mask"], _ = _read_mask("attn_mask", attn_mask, attn_mask_mode, shape)
    if key_padding_mask is not None:
        name, mode = "key_padding_mask", key_padding_mask_mode
        visible, invalid = _read_mask(name, key_padding_mask, mode, (batch, length))
        masks["key_mask"] = jnp.asarray(visible)
    out = sparse_attention(query, key, value, sparse, **masks)
    if invalid is None:
        return out
    # A compiled program cannot raise: NaN is how a bad mask shows.
    return jnp.where(invalid.any(axis=1)[:, None, None, None], jnp.nan, out)


def _check_modes(key_mode, score_mode):
    """Refuses modes other than `add` and `mul`."""
    modes = {"key_padding_mask_mode": key_mode, "attn_mask_mode": score_mode}
    problems = [
        Problem(name, mode, "is not a mode", "use 'add' or 'mul'")
        for name, mode in modes.items()
        if mode not in ("add", "mul")
    ]
    if problems:
        raise ConfigError(*problems)


def _check_heads(query, key, value, num_heads):
    """Refuses queries, keys or values of other shapes than the pattern has."""
    shape = jnp.shape(query)
    if len(shape) != 4 or 0 in shape or shape[2] != num_heads:
        problem = f"is not [batch, tokens, {num_heads}, channels]"
        remedy = "give one or more of each, and the heads of the pattern third"
        raise ConfigError(Problem("query.shape", shape, problem, remedy))
    for name, x in (("key", key), ("value", value)):
        if jnp.shape(x)[:2] + jnp.shape(x)[3:] != shape[:2] + shape[3:]:
            problem = f"is not [{shape[0]}, {shape[1]}, heads, {shape[3]}]"
            remedy = "give one for each of the queries"
            raise ConfigError(Problem(f"{name}.shape", jnp.shape(x), problem, remedy))


def _check_scores(rpe, attn_mask):
    """Refuses bias and masks that only exist while the program runs."""
    if rpe is not None:
        raise NotImplementedError(
            f"rpe.shape={jnp.shape(rpe)} cannot be added to the scores of blocks; give "
            "what only masks to zjax_kernels.make_plan(..., mask=), or use "
            "jax.nn.dot_product_attention(..., bias=)"
        )
    if isinstance(attn_mask, jax_core.Tracer):
        raise NotImplementedError(
            f"attn_mask.shape={attn_mask.shape} is known only while the program runs; "
            "close over an array, or make a plan before with "
            "zjax_kernels.make_plan(..., mask=)"
        )


def _read_mask(name, mask, mode, shape):
    """Reads where keys are visible and, for traced masks, where a mask is invalid."""
    is_traced = isinstance(mask, jax_core.Tracer)
    mask = mask if is_traced else np.asarray(mask)
    # DeepSpeed's masks may have dims of size 1 anywhere.
    if [n for n in mask.shape if n != 1] != [n for n in shape if n != 1]:
        problem, remedy = f"is not {shape}", "give one number for each"
        raise ConfigError(Problem(f"{name}.shape", mask.shape, problem, remedy))
    mask = mask.reshape(shape)
    if mode == "mul":
        return mask != 0, None
    remedy = f"use 0.0 and -10000.0, or {name}_mode='mul'"
    if not jnp.issubdtype(mask.dtype, jnp.floating):
        problem = "is not a floating dtype, as additive masks need"
        raise ConfigError(Problem(f"{name}.dtype", mask.dtype.name, problem, remedy))
    visible, invalid = mask > MASK_THRESHOLD, (mask != 0) & ~(mask <= MASK_THRESHOLD)
    if is_traced:
        return visible, invalid
    if invalid.any():
        problem = "neither masks a key nor leaves it visible"
        raise ConfigError(Problem(name, float(mask[invalid][0]), problem, remedy))
    return visible, None
