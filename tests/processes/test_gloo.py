"""Groups of devices connect while processes are together, and limits are named."""

import contextlib
import itertools

import jax
import pytest

from zjax.errors import ProcessError
from zjax.processes import barrier as gloo
from zjax.settings import schema
from zjax.sharding.mesh import make_mesh

LATE = (
    "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out "
    "with key: cpu:gloo/0,1/1 and duration: 29.99s"
)
SCATTER = "Gloo ReduceScatter failed: [buffer.cc:72] Read timeout [127.0.0.1]:1422"


def test_every_group_along_axes_is_connected_after_a_barrier(monkeypatch):
    """Fails if the first collective of a group waits for a process that compiles."""
    mesh = make_mesh(schema.Mesh(data=2, tensor=2, pipeline=2))
    done, run = [], gloo._sum_over

    @contextlib.contextmanager
    def barrier(name):
        done.append(name.rpartition("-")[0])
        yield

    def sum_over(mesh, axes):
        done.append(axes)
        return run(mesh, axes)

    monkeypatch.setattr(gloo, "barrier", barrier)
    monkeypatch.setattr(gloo, "_sum_over", sum_over)
    gloo.connect(mesh)
    assert done == []  # alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gloo.connect(mesh)
    first, *groups = done
    assert first == "zjax-connect"
    names = ("data", "tensor", "pipeline")
    several = [{*pair} for pair in itertools.combinations(names, 2)] + [{*names}]
    assert sorted(map(sorted, groups)) == sorted(
        map(sorted, [{name} for name in names] + several)
    )
    assert float(run(mesh, ("data", "tensor"))) == 4


@pytest.mark.parametrize("said", [LATE, SCATTER])
def test_a_limit_of_gloo_is_named_with_what_to_do(said):
    with pytest.raises(ProcessError) as error, gloo.explain_timeouts():
        raise jax.errors.JaxRuntimeError(f"UNKNOWN: {said} [type.google: '']")
    assert str(error.value) == (
        "processes.num_processes=1 waited 30 s for each other, Gloo's fixed limit on "
        f"CPUs (UNKNOWN: {said}); run one process for "
        "the CPUs of a machine, or on one that is less busy, and run again to resume"
    )


def test_other_errors_of_devices_stay_as_they_are():
    said = "UNKNOWN: Gloo ReduceScatter failed: Connection closed by peer"
    with pytest.raises(jax.errors.JaxRuntimeError, match=said), gloo.explain_timeouts():
        raise jax.errors.JaxRuntimeError(said)
