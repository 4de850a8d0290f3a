"""Arrays on their way between devices and files, as few at a time as memory allows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from zjax.checkpoint import halves, layout, tiles, views
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.saved import READ_AHEAD_BYTES, Saved, at_rest, place_slices
from zjax.processes.host import host_memory_bytes
from zjax.sharding import placement
from zjax.sharding.placement import ArrayPlan, dtype_bytes, num_distinct_shards
from zjax.sharding.plan import DEVICE, HOST
from zjax.storage.array import DiskArray
from zjax.train.master import half_at_rest
from zjax.train.state import place_given

_HOST_GROUP_BYTES = 2**30
_SMALL_BYTES = 2**30
_COPIED_SHARE = 0.4
"""Of a host's memory, that copies of a state may take: Orbax makes others of them."""


def describe(x: jax.Array | DiskArray, row: ArrayPlan) -> Entry:
    """What the checkpoint says of an array.

    Args:
        x: Array in its stored shape.
        row: Its place.

    Returns:
        Its unpadded shape and its dtype.
    """
    impl = ""
    if isinstance(x, jax.Array) and layout.is_key(x.dtype):
        impl = str(jax.random.key_impl(x))
    return Entry(tuple(row.shape), str(x.dtype), impl)


def unpadded(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """The array as it is saved: without padding, random keys as their words.

    Args:
        x: Array in its stored shape.
        row: Its place.

    Returns:
        An array on the same mesh. JAX has no uneven shards, so dims that were padded
        are gathered; the others stay split.
    """
    if layout.is_key(x.dtype):
        return jax.random.key_data(x)
    if row.shape == row.stored_shape:
        return x
    sizes = zip(row.shape, row.stored_shape, strict=True)
    padded = [logical != stored for logical, stored in sizes]
    entries = [*row.spec, *[None] * (len(padded) - len(row.spec))]
    kept = [None if cut else e for cut, e in zip(padded, entries, strict=True)]
    whole = NamedSharding(row.stored.mesh, PartitionSpec(*kept))
    cut = jax.jit(placement.unpad, static_argnums=1, out_shardings=whole)
    return cut(jax.device_put(x, _on_device(row)), row)


def copy_to_host(named: Mapping[str, jax.Array]) -> dict[str, jax.Array] | None:
    """Starts to copy what is on the devices.

    Args:
        named: Arrays as they are saved.

    Returns:
        Copies in pinned memory, on their way; None where some rest there already, where
        copies of all shards would take too much of the host, and in a run of many
        processes.
    """
    if not _are_copied([(x.sharding, x.shape, x.dtype) for x in named.values()]):
        return None
    return {
        name: jax.device_put(x, x.sharding.with_memory_kind(HOST), may_alias=False)
        for name, x in named.items()
    }


def pin(rows: Iterable[ArrayPlan]) -> None:
    """Has a GPU's host memory pinned, which is slow, and kept for the next to come.

    Args:
        rows: Places of arrays of which there will be copies on the host.
    """
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    moved = [
        (row.stored, row.stored_shape, row.stored_dtype)
        for row in rows
        if not row.disks and not layout.is_key(row.stored_dtype)
    ]
    if not devices or not _are_copied(moved):
        return
    held = [
        jax.device_put(
            np.zeros(sharding.shard_shape(shape), dtype),
            SingleDeviceSharding(device, memory_kind=HOST),
        )
        for device in devices
        for sharding, shape, dtype in moved
    ]
    jax.block_until_ready(held)


def _are_copied(arrays: Sequence[tuple[Any, tuple[int, ...], Any]]) -> bool:
    """Whether none rests on the host, and copies of all shards are not much more."""
    if any(sharding.memory_kind == HOST for sharding, _, _ in arrays):
        return False
    if jax.process_count() > 1:  # its barriers are programs, to be started in turn
        return False
    copied = distinct = 0
    for sharding, shape, dtype in arrays:
        size = math.prod(sharding.shard_shape(shape)) * dtype_bytes(dtype)
        copied += len(sharding.addressable_devices) * size
        distinct += num_distinct_shards(sharding, shape) * size
    allowed = max(2 * distinct, _SMALL_BYTES)
    return copied <= min(allowed, host_memory_bytes() * _COPIED_SHARE)


def read_arrays(saved: Saved, named: Mapping[str, ArrayPlan]) -> list[Any]:
    """Reads arrays straight onto their shards.

    What rests elsewhere passes through the device a little at a time, so that the
    device never holds what the plan keeps off it.

    Args:
        saved: Those of a checkpoint: of these names, or their layers or stacks, in
            as many tiles or others, whole or in halves.
        named: Places by name.

    Returns:
        Arrays in their stored shapes, in the order of `named`.
    """
    num_tiles, arrays = tiles.num_tiles(named), dict[str, Any]()
    whole = views.cached(views.tiled(saved.source, 1))
    wanted = views.tiled(whole, num_tiles, given=1).entries
    masters = halves.masters_of_halves(layout.describe_rows(named))
    masters_saved = halves.masters_of_halves(saved.entries)

    def is_as_saved(name: str) -> bool:
        master = masters_saved.get(name, name)
        in_halves = (master in names.values() for names in (masters_saved, masters))
        is_tiled_so = wanted.get(master) == saved.source.entries.get(master)
        return is_tiled_so and len({*in_halves}) == 1

    found = {n: entry for n, entry in saved.entries.items() if is_as_saved(n)}
    written = {
        name: row
        for name, row in named.items()
        if name in found and not found[name].is_empty and name not in saved.linked
    }
    for group in _groups(written):
        args = {name: _restore_args(row, found[name]) for name, row in group.items()}
        largest = max(row.device_bytes for row in group.values())
        ahead_bytes = max(READ_AHEAD_BYTES, 2 * largest)
        for name, data in saved.restore(args, ahead_bytes).items():
            if found[name].key_impl:
                data = jax.random.wrap_key_data(data, impl=found[name].key_impl)
            arrays[name] = at_rest(data, group[name])

    source = views.as_wanted(whole, layout.describe_rows(named), given=1)
    # Layers of one stack, tiles of one layer, and halves follow one another.
    for name in sorted(named, key=lambda name: tiles.whole_of(masters.get(name, name))):
        row = named[name]
        if name not in found:
            data = source.whole(masters.get(name, name))
            given = place_given(half_at_rest(data, row), row)
            arrays[name] = jax.block_until_ready(given)
        elif found[name].is_empty:
            data = np.zeros(row.stored_shape, row.stored_dtype)
            arrays[name] = jax.device_put(data, row.stored)
        elif name in saved.linked:
            arrays[name] = place_slices(saved.part(name), row)
    return [arrays[name] for name in named]


def _on_device(row: ArrayPlan) -> NamedSharding:
    return NamedSharding(row.stored.mesh, row.spec)


def _restore_args(row: ArrayPlan, entry: Entry) -> Any:
    import orbax.checkpoint as ocp

    if entry.key_impl:
        return ocp.ArrayRestoreArgs(sharding=_on_device(row))
    return ocp.ArrayRestoreArgs(
        sharding=_on_device(row),
        global_shape=row.stored_shape,
        dtype=row.stored_dtype,
        strict=row.shape == row.stored_shape,
    )


def _groups(named: Mapping[str, ArrayPlan]) -> list[dict[str, ArrayPlan]]:
    """All that rests on the device at once, what rests elsewhere a little at a time."""
    groups = [{n: r for n, r in named.items() if r.memory == DEVICE}]
    group: dict[str, ArrayPlan] = {}
    for name, row in named.items():
        if row.memory == DEVICE:
            continue
        filled = sum(other.device_bytes for other in group.values())
        if group and filled + row.device_bytes > _HOST_GROUP_BYTES:
            groups.append(group)
            group = {}
        group[name] = row
    return [g for g in (*groups, group) if g]
