"""Digest of the weights of a state, equal on every mesh."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from zjax.sharding.placement import ArrayPlan, unpad
from zjax.sharding.plan import Plan
from zjax.storage.move import to_devices
from zjax.train.state import TrainState, stored_compute
from zjax.weights.source import name_leaves

_SEEDS = 0x9E3779B9, 0x85EBCA6B


def digest_weights(state: TrainState, plan: Plan, settings: str = "") -> str:
    """Hashes the parameters of a state, one array on the devices at a time.

    Args:
        state: State of a run; not consumed.
        plan: Plan of the run.
        settings: Text that is hashed, too.

    Returns:
        16 hexadecimal digits, by names, dtypes and bits of parameters without padding.
    """
    arrays, rows = state.master, plan.master
    if state.params != ():  # the master weights are stored elsewhere, or as low bits
        arrays, rows = stored_compute(state, plan), plan.compute
    plans = name_leaves(rows)
    checksum = hashlib.sha256(settings.encode())
    for name, array in name_leaves(arrays).items():
        row = plans[name]
        x = to_devices(array, row, is_consumed=False)
        sums = np.asarray(jax.block_until_ready(_checksums(x, row)))
        checksum.update(f"{name} {x.dtype} {row.shape}".encode() + sums.tobytes())
    return checksum.hexdigest()[:16]


@functools.partial(jax.jit, static_argnums=1)
def _checksums(x: Array, row: ArrayPlan) -> UInt32[Array, "2"]:
    """Sums hashes of all elements and their positions, modulo 2**32."""
    x = unpad(x, row)
    if jnp.issubdtype(x.dtype, jnp.floating):
        kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
        x = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])
    bits, place, stride = x.astype(jnp.uint32), jnp.uint32(0), 1
    for dim in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(
            stride % 2**32
        )
        stride *= x.shape[dim]
    # Integer sums do not depend on their order, hence on how devices split the array.
    sums = [_mix(bits ^ _mix(place + jnp.uint32(s))).sum() for s in _SEEDS]
    return jnp.stack(sums).astype(jnp.uint32)


def _mix(x):
    """Mixes bits by the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
