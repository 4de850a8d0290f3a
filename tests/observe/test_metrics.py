"""The device never waits for the host: shown with a step that cannot end."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.gates import start_gated
from zjax.observe import LateMetrics
from zjax.settings import schema
from zjax.sharding import mesh as meshes


def test_pushing_a_step_does_not_wait_for_it():
    """Fails if `push` reads the newest step: it would wait until the gate gives up."""
    gate = threading.Event()
    late = LateMetrics()
    late.push(1, {"loss": jnp.float32(2.5)})
    newest = start_gated(gate, patience_seconds=300)
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


def test_arrays_are_lists():
    late = LateMetrics()
    late.push(1, {"load": jnp.array([[3, 1], [2, 2]])})
    assert late.flush() == (1, {"load": [[3, 1], [2, 2]]})


def test_metrics_of_local_steps_are_means_over_replicas():
    """Fails if the first replica speaks for all, or if a replica's devices add up."""
    mesh = meshes.make_mesh(schema.Mesh(replica=4, data=2))
    place = NamedSharding(mesh, PartitionSpec())

    def varying(by_replica):
        numbers = np.repeat(by_replica, 2)
        parts = [
            jax.device_put(x, device)
            for x, device in zip(numbers, mesh.devices.ravel(), strict=True)
        ]
        return jax.make_array_from_single_device_arrays((), place, parts)

    metrics = {
        "loss": varying(np.float32([1, 2, 3, np.nan])),
        "weight": varying(np.float32([2, 1, 1, 0])),
        "grad_norm": varying(np.float32([1, 2, 3, 6])),
        "rows": varying(np.int32([5, 6, 7, 8])),
    }
    late = LateMetrics()
    late.push(1, metrics, is_shared=False)
    expected = {"loss": 1.75, "weight": 4.0, "grad_norm": 3.0, "rows": 26.0}
    assert late.flush() == (1, expected)
