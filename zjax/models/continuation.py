"""The built-in decoder as functions that continue text, with any store of keys."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from zjax.models.block import Block, BlockGroup, layers_of, segments_of
from zjax.models.joined import layer_joiner, streaming
from zjax.models.nnx import nest, values_of
from zjax.models.stack import Decoder, head_table, make_stack, without_tiles
from zjax.ops import invariant
from zjax.ops.attention import Bounds
from zjax.ops.narrow import WeightDtype
from zjax.ops.sparse import Sparse
from zjax.typing import Continuation, Params, RecordExperts, Stack, logsumexp


class How(NamedTuple):
    """How the tokens of a layer attend to keys."""

    bounds: Bounds
    sparse: Sparse | None
    """Layout of live blocks; None if a token sees all keys within `bounds`."""
    sinks: Float[Array, " H"] | None
    """Score of each head without a key."""
    value_size: int
    """Channels of stored values that are read, the first; 0 is all."""
    invariant: bool = False
    """Whether sums have one order, see `zjax.ops.invariant`."""


AttendTo = Callable[..., tuple[jax.Array, Any]]
"""`attend(cache, how, q, k, v, stored) -> (outputs, cache)`, see `Continuation`."""


def decoder_stack(
    model: Decoder, *, joins: bool = False, weight_dtype: WeightDtype = "compute"
) -> Stack:
    """Makes the stack of a decoder with values or shapes, able to continue text.

    Blocks take parameters of `Continuation.lay`, which prepares the matrices of latent
    attention. With `joins` it also puts kernels side by side, and with a narrow
    `weight_dtype` it makes codes.
    """
    continuation = _continuation(model, joins, weight_dtype)
    return dataclasses.replace(make_stack(model), continuation=continuation)


def form_of(model: Decoder) -> Hashable:
    """Returns what decoders of equal programs share: all but the values."""
    return nnx.graphdef(model)


def params_of(model: Decoder) -> Params:
    """Returns the parameters of a decoder, as the stack takes them."""
    return nest(values_of(nnx.state(model, nnx.Param)))


def _continuation(
    model: Decoder, joins: bool, weight_dtype: WeightDtype
) -> Continuation:
    """Makes the functions from a decoder; tiles are left to the caller."""
    config, original = model.config, segments_of(model.blocks).values()
    model = streaming(model, joins=joins, weight_dtype=weight_dtype)
    embedding_graph, _ = nnx.split(model.embedding)
    head_graph, _ = nnx.split(model.head)
    segments = [*segments_of(model.blocks).values()]

    def embed(params, batch):
        embedding = nnx.merge(embedding_graph, params["embedding"])
        # Rings of training permute the tokens of a row; here each row is one token.
        embedding.config = dataclasses.replace(config, sequence_attention="ulysses")
        return embedding(batch)

    def step_of(blocks):
        is_tiled = config.mlp_tiles > 1
        graph, _ = nnx.split(without_tiles(blocks) if is_tiled else blocks)

        def read(params, carry, context, attend, caches, record=None):
            block = nnx.merge(graph, params)
            return _read(block, carry, context, attend, caches, is_tiled, record)

        return read

    def score(params, carry):
        head = nnx.merge(head_graph, params["head"])
        return head.logits(carry, head_table(params, config))[:, 0]

    return Continuation(
        embed=embed,
        blocks=tuple(map(step_of, segments)),
        num_layers=tuple(len(layers_of(blocks)) for blocks in segments),
        lay=tuple(
            layer_joiner(*pair, weight_dtype)
            for pair in zip(original, segments, strict=True)
        ),
        score=score,
        log_partition=invariant.log_partition if model.invariant else logsumexp,
    )


def _read(
    block: Block | BlockGroup,
    x: Float[Array, "N 1 M"],
    context: Any,
    attend: AttendTo,
    caches: tuple[Any, ...],
    is_tiled: bool,
    record: RecordExperts | None,
) -> tuple[Any, tuple[Any, ...]]:
    """Runs tokens through the layers of a block; see `Continuation.blocks`."""
    updated, stream = [], (x, ())
    for layer, cache in zip(layers_of(block), caches, strict=True):
        attention = layer.attention
        value_size = attention.stored_value_size
        how = How(
            layer.bounds,
            layer.sparse,
            attention.laid_sinks(),
            value_size,
            layer.invariant,
        )
        attend_to = functools.partial(attend, cache, how)
        if is_tiled:
            stream, cache = layer.trunk_with(attend_to, stream[0], context)
        else:
            x, cache = layer.continue_with(attend_to, stream[0], context, record)
            stream = x, ()
        updated.append(cache)
    return stream, tuple(updated)
