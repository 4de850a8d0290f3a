"""Places arrays of checkpoints onto devices, piece by piece.

Pieces are read while earlier pieces are in flight, and while programs compile. The
device transposes and casts pieces, so that the host copies no more than it reads.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import spans_of
from zjax.weights.saved import Spans, place_slices, to_storage, without_padding
from zjax.weights.source import Index

_SMALL_BYTES = 8 << 20
"""Largest shard that is read as a whole, without a compiled program."""
_PIECE_BYTES = 128 << 20
"""Bytes of one piece, counted as float32."""
_MAX_ROW_BYTES = 512 << 20
"""Largest row (one index of dim 0) that is read at once; larger rows are cut along dim
1."""
_SENT_BYTES = 16 << 20
"""Bytes of one transfer; several at once are four times as fast as one."""
_AHEAD_BYTES = 2 << 30
"""Most bytes that are read ahead, counted as float32."""
Read = Callable[[Index], np.ndarray]
_Piece = tuple[Index, np.ndarray]
"""Slice of the unpadded array, and the values of that slice."""


def place_pieces(wanted: Sequence[tuple[Read, ArrayPlan]]) -> Iterator[Any]:
    """Builds stored arrays slice by slice; the host holds few slices at a time.

    One thread calls the `read` functions in turn, and reads ahead across arrays in a
    run of one process.
    """
    placed = _place_in_turn(wanted)
    _unfinished.add(placed)
    return placed


_unfinished = weakref.WeakSet[Generator[Any, None, None]]()
"""Results of `place_pieces` that are still referenced."""


@atexit.register
def _close_unfinished() -> None:
    """Ends read-ahead threads before modules are torn down."""
    # Python closes generators at exit only after the modules.
    for placed in list(_unfinished):
        placed.close()


def _place_in_turn(
    wanted: Sequence[tuple[Read, ArrayPlan]],
) -> Generator[Any, None, None]:
    """Yields the arrays in turn, fed by a read-ahead thread."""
    # Array by array in runs of several processes: a read and a program may both wait
    # for other processes, so all processes need one order.
    parts = [[each] for each in wanted] if jax.process_count() > 1 else [wanted]
    for part in parts:
        slices = (
            (read, index)
            for read, plan in part
            for spans in _find_devices(plan)
            for _, index in _cut(plan, spans)
        )
        with contextlib.closing(_read_ahead(slices)) as pieces:
            for _, plan in part:
                yield _place(plan, pieces)


def _read_alone(read: Read, index: Index) -> np.ndarray:
    """Reads a slice as an array that keeps no larger buffer alive."""
    piece = read(index)
    whole = piece
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    # order="K" keeps the memory order, by which the device transposes.
    return piece.copy(order="K") if whole.nbytes > piece.nbytes else piece


def _place(plan: ArrayPlan, pieces: Iterator[_Piece]) -> Any:
    """Builds one array from the next pieces."""

    def read(index: Index) -> np.ndarray:
        found, piece = next(pieces)
        # Pieces were queued in the order of `_find_devices` and `_cut`.
        assert found == index
        return piece

    if _is_small(plan):
        return place_slices(read, plan)
    shards = [
        shard
        for spans, devices in _find_devices(plan).items()
        for shard in _place_shard(read, plan, spans, devices)
    ]
    array = jax.make_array_from_single_device_arrays(
        plan.stored_shape, plan.on_device.stored, shards
    )
    return to_storage(array, plan)


def _is_small(plan: ArrayPlan) -> bool:
    """Whether a shard of the array is read as a whole."""
    shape = plan.on_device.stored.shard_shape(plan.stored_shape)
    num_bytes = math.prod(shape) * jnp.dtype(plan.stored_dtype).itemsize
    return num_bytes <= _SMALL_BYTES


def _find_devices(plan: ArrayPlan) -> dict[Spans, list[Any]]:
    """Groups local devices by the spans of the shard on each."""
    devices: dict[Spans, list[Any]] = {}
    sharding = plan.on_device.stored
    indices = sharding.addressable_devices_indices_map(plan.stored_shape)
    for device, index in indices.items():
        spans = spans_of(index, plan.stored_shape)
        devices.setdefault(spans, []).append(device)
    return devices


def _place_shard(
    read: Read, plan: ArrayPlan, spans: Spans, devices: Sequence[Any]
) -> list[jax.Array]:
    """Builds the shard of some spans on each of the given devices."""
    shape = [stop - start for start, stop in spans]
    shards = [jnp.zeros(shape, plan.stored_dtype, device=x) for x in devices]
    sent: list[list[jax.Array]] = []
    for starts, index in _cut(plan, spans):
        piece = read(index)
        # Dims in memory order, which makes the flat parts views without a host copy.
        order = np.argsort([-x for x in piece.strides], kind="stable")
        piece = piece.transpose(order)
        # At most one piece in flight, which bounds host memory.
        jax.block_until_ready(sent)
        sent = [jax.device_put(_divide(piece), x) for x in devices]
        back = tuple(map(int, np.argsort(order)))
        shards = [
            _write(shard, parts, starts, shape=piece.shape, order=back)
            for shard, parts in zip(shards, sent, strict=True)
        ]
    return shards


def _divide(piece: np.ndarray) -> list[np.ndarray]:
    """Splits a piece into flat parts of `_SENT_BYTES`."""
    # Flat: JAX transposes on the host a part that has dims and a single element.
    values, size = piece.reshape(-1), _SENT_BYTES // piece.itemsize
    return [values[i : i + size] for i in range(0, values.size, size)]


def _cut(plan: ArrayPlan, spans: Spans) -> Iterator[tuple[tuple[int, ...], Index]]:
    """Yields positions in the shard, and slices of the unpadded array.

    A small shard is one slice. A large shard is cut along dim 0, or along dim 1 where
    one row is too large, such as all experts of a layer.
    """
    unpadded = without_padding(spans, plan)
    if unpadded is None:
        return
    if _is_small(plan):
        yield (0,) * len(spans), unpadded
        return
    sizes = [x.stop - x.start for x in unpadded]
    # As float32: the dtype in the file is not known here.
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
            # strict=False: dims behind the cut one are taken whole.
            for first, n, x in zip(firsts, steps, unpadded, strict=False)
        ]
        starts = [first - x.start for first, x in zip(firsts, unpadded, strict=False)]
        starts += [0] * (len(sizes) - len(starts))
        yield tuple(starts), (*index, *unpadded[dim + 1 :])


def _read_ahead(
    slices: Iterable[tuple[Read, Index]],
) -> Generator[_Piece, None, None]:
    """Reads slices in turn, in a thread, up to `_AHEAD_BYTES` ahead."""
    waiting = collections.deque[tuple[int, Index, concurrent.futures.Future[Any]]]()
    num_bytes, thread = 0, concurrent.futures.ThreadPoolExecutor(1, "read-ahead")

    def take() -> _Piece:
        nonlocal num_bytes
        size, index, piece = waiting.popleft()
        num_bytes -= size
        return index, piece.result()

    try:
        for read, index in slices:
            size = 4 * math.prod(x.stop - x.start for x in index)
            while waiting and num_bytes + size > _AHEAD_BYTES:
                yield take()
            waiting.append((size, index, thread.submit(_read_alone, read, index)))
            num_bytes += size
        while waiting:
            yield take()
    finally:
        # Also reached if the consumer stops early and closes this generator.
        thread.shutdown(cancel_futures=True)


# The shard is donated: it is filled in place.
@functools.partial(jax.jit, donate_argnums=0, static_argnames=("shape", "order"))
def _write(
    shard: jax.Array,
    parts: list[jax.Array],
    starts: tuple[jax.Array, ...],
    *,
    shape: tuple[int, ...],
    order: tuple[int, ...],
) -> jax.Array:
    """Writes a piece into a shard, transposed and cast on the device."""
    piece = jnp.concatenate(parts).reshape(shape)
    piece = piece.transpose(order).astype(shard.dtype)
    return jax.lax.dynamic_update_slice(shard, piece, starts)
