"""DeepSpeed's padding helpers for sparse attention models, under DeepSpeed's names.

Reference: DeepSpeed, `ops/sparse_attention/sparse_attention_utils.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.errors import ConfigError, Problem
from zjax_kernels.sparse.arguments import integer_problems


class Padded(NamedTuple):
    """Padded inputs, in DeepSpeed's order; inputs not given are None."""

    pad_len: int
    """Number of tokens added."""
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

    `SparseSelfAttention` pads by itself; other layers may need this.

    Args:
        block_size: Tokens per block, >= 1.
        input_ids: Token ids, padded with `pad_token_id`.
        attention_mask: Mask [B, S], padded with False; all True if None.
        token_type_ids: Segment types, padded with 0.
        position_ids: Positions, padded with `pad_token_id`.
        inputs_embeds: Embeddings, padded with that of `pad_token_id`, or with 0.
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
        table: One row per position, after the reserved ones.
        max_position: Number of positions of the result, more than the table has.
        num_reserved: Number of first rows that are not positions, from 0 to N - 1: 0 in
            BERT, 2 in RoBERTa.

    Returns:
        The reserved rows once, then the others repeated.

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
    if integer_problems(name, value, least):
        problem, remedy = f"is not an integer >= {least}", f"give {least} or more"
        raise ConfigError(Problem(name, value, problem, remedy))


def _common_shape(**inputs):
    """Batch and length, on which all inputs must agree."""
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
