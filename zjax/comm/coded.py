"""All-gather and reduce-scatter of packed codes inside `jax.shard_map` (ZeRO++).

Each value is coded once by the gather, and once per mesh axis by the reduction, which
sums in float32: a ring would code each value once per device.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zjax.comm import messages
from zjax.comm.codecs import Codec, IntegerBlocks

CODECS: dict[str, Codec] = {
    "int8": IntegerBlocks(bits=8),
    "int4": IntegerBlocks(bits=4, block=64),
}
"""Codecs by the name in a plan. Four bits need small blocks: after 500 steps of a tiny
GPT the loss is above the loss of ZeRO-3 by 1.1 % with 128 numbers, by 0.7 % with 64."""


def all_gather(
    shard: jax.Array, axes: Sequence[str], dim: int, codec: Codec
) -> jax.Array:
    """All-gathers an array as packed codes; only the gathered copy is lossy.

    Major axes come first. The result is the same bits on all devices of the axes.

    Reference:
        ZeRO++, arXiv:2306.10209, section 3.1 (qwZ).
    """
    packed = codec.encode(_padded(shard.reshape(1, -1), codec).reshape(-1))
    gathered = messages.all_gather(packed, tuple(axes))
    shards = jax.vmap(codec.decode)(gathered)[:, : shard.size].astype(shard.dtype)
    side_by_side = jnp.moveaxis(shards.reshape(-1, *shard.shape), 0, dim)
    shape = list(shard.shape)
    shape[dim] = -1
    return side_by_side.reshape(shape)


def reduce_scatter(
    x: jax.Array, axes: Sequence[str], dim: int, codec: Codec
) -> jax.Array:
    """Sums an array over devices, by an all-to-all of codes over one axis at a time.

    With the devices of a node as the first axis and the nodes as the second, each sum
    crosses nodes once. Shards lie in the order of `axes`, first axis major, so that
    device d of node n gets shard d * nodes + n and no values are reordered.

    Reference:
        ZeRO++, arXiv:2306.10209, section 3.3 (qgZ).
    """
    num_shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
    shape = list(x.shape)
    shape[dim] //= num_shards
    split = x.reshape(*shape[:dim], num_shards, shape[dim], *shape[dim + 1 :])
    shards = jnp.moveaxis(split, dim, 0).reshape(num_shards, -1)
    # Each shard is padded apart: no block spans two shards.
    total = _padded(shards, codec).reshape(-1)
    for axis in axes:
        total = _sum_of_chunks(total, axis, codec)
    size = shards.shape[1]
    return total[:size].reshape(shape).astype(x.dtype)


def _sum_of_chunks(x: jax.Array, axis: str, codec: Codec) -> jax.Array:
    """Sends chunk j of a vector to device j, and adds up the received chunks."""
    received = messages.exchange_chunks(codec.encode(x), axis)
    return jax.vmap(codec.decode)(received).sum(axis=0)


def _padded(vectors: jax.Array, codec: Codec) -> jax.Array:
    """Casts vectors [n, size] to float32, and pads each to whole blocks."""
    end = -vectors.shape[1] % codec.block
    return jnp.pad(vectors.astype(jnp.float32), [(0, 0), (0, end)])
