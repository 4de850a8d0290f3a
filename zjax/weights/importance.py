"""Measures how important layers, heads, channels and experts of a decoder are.

Layers are read, run over all rows and dropped one by one: no more than one layer of the
model is in memory.

Reference:
    Muralidharan et al., Minitron (arXiv:2407.14679, section 2.2); layers: Men et al.,
    ShortGPT (arXiv:2403.03853).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.models.activations import measured_block
from zjax.models.block import Activations
from zjax.models.nnx import nest_named
from zjax.typing import Batch, Model, Params
from zjax.weights.files import tensor_name
from zjax.weights.pruning import Importance
from zjax.weights.source import Source, name_leaves

_BLOCKS = "blocks/"


def measure(
    model: Model, source: Source, batches: Sequence[Batch], dtype: Any
) -> Importance:
    """Measures a decoder with layers of one kind on small batches of equal shapes.

    Args:
        model: Built-in decoder, without tiles.
        source: Weights by tensor name, with layers stacked.
        batches: Tokens, and segments of packed documents.
        dtype: Dtype of the computation.

    Returns:
        Means over all tokens that are not padding.
    """
    assert model.stack is not None
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    names = {x: tensor_name(x) for x in name_leaves(shapes)}
    outside = [x for x in names if not x.startswith(_BLOCKS)]
    params = nest_named({x: source.read_all(names[x]).astype(dtype) for x in outside})
    embed = jax.jit(functools.partial(model.stack.embed, key=None))
    streams = [embed(params, batch) for batch in batches]
    run = jax.jit(functools.partial(_sums_of_block, measured_block(model)))
    masks = [real_tokens(batch) for batch in batches]
    sums = []
    for number in range(model.stack.segments[0].num_blocks):
        block = _layer(source, names, number, dtype)
        found = []
        for place, (stream, context) in enumerate(streams):
            stream, each = run(block, stream, context, masks[place])
            streams[place] = stream, context
            found.append(jax.device_get(each))
        sums.append(jax.tree.map(lambda *x: np.sum(x, 0, np.float64), *found))
    num_tokens = sum(float(x.sum()) for x in masks)
    means = jax.tree.map(lambda *x: np.stack(x) / num_tokens, *sums)
    return means._replace(channels=means.channels.mean(0))


def _layer(source: Source, names: Mapping[str, str], number: int, dtype: Any) -> Params:
    """Reads the parameters of one layer."""
    found = {}
    for path, name in names.items():
        if path.startswith(_BLOCKS):
            others = (slice(0, x) for x in source.entries[name].shape[1:])
            values = source.read(name, (slice(number, number + 1), *others))
            found[path.removeprefix(_BLOCKS)] = values[0].astype(dtype)
    return nest_named(found)


def real_tokens(batch: Batch) -> jax.Array:
    """Marks the tokens that are no padding, bool[B, L]."""
    ids = batch.get("segment_ids")
    if ids is None:
        return jnp.ones(batch["tokens"].shape, bool)
    return jnp.asarray(ids) != 0


def _sums_of_block(block, params, stream, context, mask):
    """Runs a block; returns the stream, and sums over the tokens of `Importance`."""
    output, found = block(params, stream, context)
    groups = params["attention"]["key"]["kernel"].shape[1]
    return output, sums_of(stream, output, found, mask, groups)


def sums_of(
    before: jax.Array,
    after: jax.Array,
    found: Activations,
    mask: jax.Array,
    num_groups: int,
) -> Importance:
    """Sums the importance of the parts of a layer over tokens, in float32.

    Args:
        before: Stream that enters the layer, [B, L, M].
        after: Stream that leaves it, [B, L, M].
        found: What the matrices of the layer read.
        mask: Tokens that count, bool[B, L].
        num_groups: Number of groups of heads that share keys and values.
    """

    def total(x: jax.Array) -> jax.Array:
        return jnp.einsum("bl,bl...->...", mask.astype(jnp.float32), x)

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def none() -> jax.Array:
        return jnp.zeros(0, jnp.float32)

    norms = jnp.linalg.norm(wide(found.heads), axis=-1)
    norms = norms.reshape(*norms.shape[:2], num_groups, -1).sum(-1)
    inputs = wide(found.attention_input), wide(found.mlp_input)
    return Importance(
        total(1 - _cosine(wide(before), wide(after))),
        total(jnp.abs(inputs[0]) + jnp.abs(inputs[1])) / 2,
        total(norms),
        none() if found.hidden is None else total(jnp.abs(wide(found.hidden))),
        none() if found.experts is None else total(found.experts),
    )


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """Cosine of two vectors in the last dim; 1 if both are 0."""
    product = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    cosine = (x * y).sum(-1) / jnp.where(product > 0, product, 1)
    return jnp.where(product > 0, cosine, jnp.where((x == y).all(-1), 1, 0))
