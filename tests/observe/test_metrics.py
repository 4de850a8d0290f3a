"""The device never waits for the host: shown with a step that cannot end."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zjax.observe import LateMetrics

PATIENCE_SECONDS = 10


def test_pushing_a_step_does_not_wait_for_it():
    """Fails if `push` reads the newest step: it would wait until the gate gives up."""
    gate = threading.Event()

    def wait(x):
        return np.float32(x if gate.wait(PATIENCE_SECONDS) else np.nan)

    @jax.jit
    def gated(x):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(wait, scalar, x.sum())

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    late = LateMetrics()
    late.push(1, {"loss": jnp.float32(2.5)})
    newest = gated(x)
    assert late.push(2, {"loss": newest}) == (1, {"loss": 2.5})
    assert not newest.is_ready()
    gate.set()
    assert late.flush() == (2, {"loss": 8.0})


def test_every_step_is_given_once():
    late = LateMetrics()
    given = [late.push(n, {"loss": jnp.float32(n)}) for n in range(3)]
    given += [late.flush(), late.flush()]
    assert given == [
        None,
        (0, {"loss": 0.0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0}),
        None,
    ]


def test_values_are_read_in_any_dtype():
    late = LateMetrics()
    late.push(1, {"scale": jnp.bfloat16(1.5), "skipped_steps": jnp.int32(3)})
    assert late.flush() == (1, {"scale": 1.5, "skipped_steps": 3.0})
