"""A computation that ends when the test lets it, or when its patience does."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def start_gated(gate: threading.Event, patience_seconds: float) -> jax.Array:
    """A scalar of 8.0 that is computed once the gate opens; NaN if it never does.

    It runs on all eight devices: on one, the CPU back end computes before it returns.
    """

    def wait(x):
        return np.float32(x if gate.wait(patience_seconds) else np.nan)

    @jax.jit
    def gated(x):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(wait, scalar, x.sum())

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    return gated(x)
