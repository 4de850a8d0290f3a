"""Large arrays of checkpoints, placed piece by piece.

A piece is read while the one before is on its way. The device transposes and casts it,
so that the host copies no more than it reads.
"""

import collections
import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.checkpoint.saved import Spans, place_slices, to_storage, without_padding
from zjax.checkpoint.views import Index
from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import spans_of

_SMALL_BYTES = 8 << 20
"""Largest shard that is read as a whole, without programs of its own."""
_PIECE_BYTES = 128 << 20
_MAX_ROW_BYTES = 512 << 20
"""Largest row, of one layer or more, that is read at once."""
Read = Callable[[Index], np.ndarray]
_Piece = concurrent.futures.Future[np.ndarray]


def place_pieces(read: Read, plan: ArrayPlan) -> Any:
    """Builds a stored array from slices; the host holds few pieces of it at a time.

    Args:
        read: Function that reads a slice of the unpadded array, in any memory order.
        plan: Plan of the array.
    """
    sharding = plan.on_device.stored
    shape = sharding.shard_shape(plan.stored_shape)
    num_bytes = math.prod(shape) * jnp.dtype(plan.stored_dtype).itemsize
    if num_bytes <= _SMALL_BYTES:
        return place_slices(read, plan)
    devices: dict[Spans, list[Any]] = {}
    indices = sharding.addressable_devices_indices_map(plan.stored_shape)
    for device, index in indices.items():
        spans = spans_of(index, plan.stored_shape)
        devices.setdefault(spans, []).append(device)
    shards = [
        shard
        for spans, places in devices.items()
        for shard in _place_shard(read, plan, spans, places)
    ]
    array = jax.make_array_from_single_device_arrays(
        plan.stored_shape, sharding, shards
    )
    return to_storage(array, plan)


def _place_shard(
    read: Read, plan: ArrayPlan, spans: Spans, devices: Sequence[Any]
) -> list[jax.Array]:
    """The shard of some spans, on each device that holds it."""
    shape = [stop - start for start, stop in spans]
    shards = [jnp.zeros(shape, plan.stored_dtype, device=x) for x in devices]
    sent: list[jax.Array] = []
    for starts, piece in _read_ahead(read, _cut(plan, spans)):
        # In the order of its bytes; a transposed view is one of an array in C order.
        order = np.argsort([-x for x in piece.strides], kind="stable")
        jax.block_until_ready(sent)
        sent = [jax.device_put(piece.transpose(order), x) for x in devices]
        back = tuple(map(int, np.argsort(order)))
        shards = [
            _write(shard, x, starts, order=back)
            for shard, x in zip(shards, sent, strict=True)
        ]
    return shards


def _cut(plan: ArrayPlan, spans: Spans) -> Iterator[tuple[tuple[int, ...], Index]]:
    """Slices of the unpadded array, and where they begin in the shard.

    They are rows, as many as fit; of rows that are too large, such as all experts of a
    layer, they are rows of these.
    """
    unpadded = without_padding(spans, plan)
    if unpadded is None:
        return
    sizes = [x.stop - x.start for x in unpadded]
    row_bytes = [4 * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    dim = int(len(sizes) > 1 and row_bytes[0] > _MAX_ROW_BYTES)
    step = max(1, _PIECE_BYTES // row_bytes[dim])
    steps = [1] * dim + [step]
    ranges = [
        range(x.start, x.stop, n)
        for x, n in zip(unpadded[: dim + 1], steps, strict=True)
    ]
    for firsts in itertools.product(*ranges):
        index = [
            slice(first, min(first + n, x.stop))
            for first, n, x in zip(firsts, steps, unpadded, strict=False)
        ]
        starts = [first - x.start for first, x in zip(firsts, unpadded, strict=False)]
        starts += [0] * (len(sizes) - len(starts))
        yield tuple(starts), (*index, *unpadded[dim + 1 :])


def _read_ahead(
    read: Read, slices: Iterator[tuple[tuple[int, ...], Index]]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    waiting = collections.deque[tuple[tuple[int, ...], _Piece]]()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for starts, index in slices:
            waiting.append((starts, thread.submit(read, index)))
            if len(waiting) > 1:
                first, piece = waiting.popleft()
                yield first, piece.result()
        for first, piece in waiting:
            yield first, piece.result()


@functools.partial(jax.jit, donate_argnums=0, static_argnames="order")
def _write(
    shard: jax.Array,
    piece: jax.Array,
    starts: tuple[jax.Array, ...],
    *,
    order: tuple[int, ...],
) -> jax.Array:
    piece = piece.transpose(order).astype(shard.dtype)
    return jax.lax.dynamic_update_slice(shard, piece, starts)
