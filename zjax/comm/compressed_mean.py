"""A mean over workers by packed messages, with error feedback on both sides."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zjax.comm.codecs import Codec
from zjax.comm.messages import all_gather, exchange_chunks


class Errors(NamedTuple):
    """Losses of the messages of one worker so far, to be added to the next messages.

    Args:
        worker: float32[n], losses of messages with the worker's vector.
        server: float32[n / N], losses of messages with the mean of the worker's chunk.
    """

    worker: jax.Array
    server: jax.Array


def padded_size(n: int, codec: Codec, num_workers: int) -> int:
    """Rounds up to whole blocks of the codec for every worker.

    Example:
        >>> from zjax.comm.codecs import make_codec
        >>> padded_size(100, make_codec("onebit"), num_workers=4)
        16384
    """
    multiple = codec.block * num_workers
    return math.ceil(n / multiple) * multiple


def compressed_mean(
    x: jax.Array, errors: Errors | None, codec: Codec, axis: str
) -> tuple[jax.Array, Errors | None]:
    """Averages a vector over the workers of a mesh axis, inside `jax.shard_map`.

    Each worker sends chunk j to worker j, which averages the chunks in float32 and
    sends the mean to all workers. The codec packs both messages, and the losses are
    added to the next messages, so that the sum over many calls is right. A mean that is
    not finite leaves the errors unchanged. Every worker gets the same bits.

    The length of `x` is a `padded_size`; None as errors means no error feedback.

    Reference:
        Tang et al., 1-bit Adam (arXiv:2102.02888), section 4 and figure 3.
    """
    corrected = x if errors is None else x + errors.worker
    packed = codec.encode(corrected)
    received = exchange_chunks(packed, axis)
    chunk = _mean(list(map(codec.decode, zip(*received, strict=True))))
    if errors is not None:
        chunk += errors.server
    packed_chunk = codec.encode(chunk)
    gathered = all_gather(packed_chunk, axis)
    mean = jax.vmap(codec.decode)(gathered).reshape(-1)
    if errors is None:
        return mean, None
    lost = Errors(corrected - codec.decode(packed), chunk - codec.decode(packed_chunk))
    mean = jax.lax.optimization_barrier(mean)  # else XLA for CPUs decodes it again
    # Else one overflow would stay in the error feedback forever.
    is_finite = jnp.isfinite(mean).all()
    return mean, jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), lost, errors
    )


def _mean(vectors: list[jax.Array]) -> jax.Array:
    """Averages vectors in float32."""
    # XLA for CPUs sums over an axis of decoded values a hundred times more slowly.
    return functools.reduce(jnp.add, vectors) / len(vectors)
