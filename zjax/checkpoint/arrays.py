"""Copies arrays to the host before a save, and restores arrays group by group."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from zjax.processes.host import host_memory_bytes
from zjax.sharding import placement
from zjax.sharding.placement import ArrayPlan, dtype_bytes, num_distinct_shards
from zjax.sharding.plan import HOST
from zjax.storage.array import DiskArray
from zjax.train.compute_params import stored_master
from zjax.train.state import place_given
from zjax.weights import layers
from zjax.weights.saved import READ_AHEAD_BYTES, SavedArrays, place_slices, to_storage
from zjax.weights.source import Entry, cached, describe_plans, is_key

_HOST_GROUP_BYTES = 2**30
"""Most bytes per device of offloaded arrays that are restored together."""
_SMALL_BYTES = 2**30
"""Bytes of host copies that are allowed even where replicas repeat shards."""
_COPIED_SHARE = 0.4
"""Share of host memory for copies of the state; below one half, since Orbax copies each
array once more."""


def describe(x: jax.Array | DiskArray, plan: ArrayPlan) -> Entry:
    """Returns unpadded shape, dtype and PRNG implementation of an array."""
    impl = ""
    if isinstance(x, jax.Array) and is_key(x.dtype):
        impl = str(jax.random.key_impl(x))
    return Entry(tuple(plan.shape), str(x.dtype), impl)


def unpadded(x: jax.Array, plan: ArrayPlan) -> jax.Array:
    """Returns the array to save: without padding, and random keys as uint32.

    Padded dims are gathered, since JAX has no uneven shards; other dims stay sharded.
    """
    if is_key(x.dtype):
        return jax.random.key_data(x)
    if plan.shape == plan.stored_shape:
        return x
    sizes = zip(plan.shape, plan.stored_shape, strict=True)
    padded = [logical != stored for logical, stored in sizes]
    # A spec may be shorter than the shape.
    axes = [*plan.spec, *[None] * (len(padded) - len(plan.spec))]
    axes = [None if pad else a for pad, a in zip(padded, axes, strict=True)]
    gathered = NamedSharding(plan.stored.mesh, PartitionSpec(*axes))
    unpad = jax.jit(placement.unpad, static_argnums=1, out_shardings=gathered)
    return unpad(jax.device_put(x, _on_device(plan)), plan)


def copy_to_host(named: Mapping[str, jax.Array]) -> dict[str, jax.Array] | None:
    """Starts copying arrays into pinned host memory; None if `_can_copy` forbids."""
    if not _can_copy([(x.sharding, x.shape, x.dtype) for x in named.values()]):
        return None
    # may_alias=False: the next step donates the state while Orbax still reads copies.
    return {
        name: jax.device_put(x, x.sharding.with_memory_kind(HOST), may_alias=False)
        for name, x in named.items()
    }


def pin(plans: Iterable[ArrayPlan]) -> None:
    """Allocates and frees pinned host buffers of the sizes of a save's copies.

    Pinning is slow on GPUs; JAX keeps freed memory pinned for the next allocation.
    """
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    moved = [
        (plan.stored, plan.stored_shape, plan.stored_dtype)
        for plan in plans
        if not plan.disks and not is_key(plan.stored_dtype)
    ]
    if not devices or not _can_copy(moved):
        return
    # All buffers are held at once, or later ones would reuse the memory of freed ones.
    held = [
        jax.device_put(
            np.zeros(sharding.shard_shape(shape), dtype),
            SingleDeviceSharding(device, memory_kind=HOST),
        )
        for device in devices
        for sharding, shape, dtype in moved
    ]
    jax.block_until_ready(held)


def _can_copy(arrays: Sequence[tuple[Any, tuple[int, ...], Any]]) -> bool:
    """Whether host copies of all local shards fit, and no array is offloaded yet."""
    if any(sharding.memory_kind == HOST for sharding, _, _ in arrays):
        return False
    if jax.process_count() > 1:  # Orbax's barriers are programs that must run in order
        return False
    copied = distinct = 0
    for sharding, shape, dtype in arrays:
        size = math.prod(sharding.shard_shape(shape)) * dtype_bytes(dtype)
        copied += len(sharding.addressable_devices) * size
        distinct += num_distinct_shards(sharding, shape) * size
    allowed = max(2 * distinct, _SMALL_BYTES)
    return copied <= min(allowed, host_memory_bytes() * _COPIED_SHARE)


def read_arrays(saved: SavedArrays, named: Mapping[str, ArrayPlan]) -> list[Any]:
    """Reads arrays onto shards, from any saved tiles, stacking and splitting.

    Offloaded arrays are staged on the device a few at a time, so that the device never
    holds the whole state. Results have stored shapes and the order of `named`.
    """
    num_tiles, arrays = layers.count_tiles(named), dict[str, Any]()
    untiled = cached(layers.untiled(saved.source))
    wanted = layers.tiled(untiled, num_tiles).entries
    masters = layers.find_split_masters(describe_plans(named))
    masters_saved = layers.find_split_masters(saved.entries)

    def has_same_layout(name: str) -> bool:
        master = masters_saved.get(name, name)
        is_split = {master in split.values() for split in (masters_saved, masters)}
        has_same_tiles = wanted.get(master) == saved.source.entries.get(master)
        return has_same_tiles and len(is_split) == 1

    # Arrays of equal layout are restored shard by shard; all others are read whole.
    found = {n: entry for n, entry in saved.entries.items() if has_same_layout(n)}
    in_orbax = {
        name: plan
        for name, plan in named.items()
        if name in found and not found[name].is_empty and name not in saved.linked
    }
    for group in _groups(in_orbax):
        args = {name: _restore_args(plan, found[name]) for name, plan in group.items()}
        largest = max(plan.device_bytes for plan in group.values())
        # Orbax needs a limit above the largest array.
        ahead_bytes = max(READ_AHEAD_BYTES, 2 * largest)
        for name, data in saved.restore(args, ahead_bytes).items():
            if found[name].key_impl:
                data = jax.random.wrap_key_data(data, impl=found[name].key_impl)
            arrays[name] = to_storage(data, group[name])

    source = layers.match_layout(untiled, describe_plans(named))
    # This order reads each saved array once, since `untiled` caches only the newest.
    for name in sorted(named, key=lambda n: layers.untiled_name(masters.get(n, n))):
        plan = named[name]
        if name not in found:
            data = source.read_all(masters.get(name, name))
            placed = place_given(stored_master(data, plan), plan)
            # Waits, so that one offloaded array at a time is staged on the device.
            arrays[name] = jax.block_until_ready(placed)
        elif found[name].is_empty:
            data = np.zeros(plan.stored_shape, plan.stored_dtype)
            arrays[name] = jax.device_put(data, plan.stored)
        elif name in saved.linked:
            arrays[name] = place_slices(saved.slice_reader(name), plan)
    return [arrays[name] for name in named]


def _on_device(plan: ArrayPlan) -> NamedSharding:
    """Sharding of an array while it is staged on the device."""
    return NamedSharding(plan.stored.mesh, plan.spec)


def _restore_args(plan: ArrayPlan, entry: Entry) -> Any:
    """Orbax's arguments for restoring one array onto the shards of a plan."""
    import orbax.checkpoint as ocp

    if entry.key_impl:
        # Saved as uint32 data, so neither shape nor dtype is the plan's.
        return ocp.ArrayRestoreArgs(sharding=_on_device(plan))
    return ocp.ArrayRestoreArgs(
        sharding=_on_device(plan),
        global_shape=plan.stored_shape,
        dtype=plan.stored_dtype,
        strict=plan.shape == plan.stored_shape,  # not strict: Orbax pads
    )


def _groups(named: Mapping[str, ArrayPlan]) -> list[dict[str, ArrayPlan]]:
    """Splits plans into arrays stored on the device and groups of offloaded arrays."""
    groups = [{n: r for n, r in named.items() if r.is_on_device}]
    group: dict[str, ArrayPlan] = {}
    for name, plan in named.items():
        if plan.is_on_device:
            continue
        filled = sum(other.device_bytes for other in group.values())
        if group and filled + plan.device_bytes > _HOST_GROUP_BYTES:
            groups.append(group)
            group = {}
        group[name] = plan
    return [g for g in (*groups, group) if g]
