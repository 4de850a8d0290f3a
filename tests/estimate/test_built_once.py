"""A command builds its model once, and each plan once."""

import pytest

from tests.support import small_run
from zjax.estimate import trial
from zjax.models import build
from zjax.run import fit, host
from zjax.run.host import limit_pinned_pool
from zjax.run.plan_report import report_plan
from zjax.sharding import plan as plans


@pytest.fixture
def built(monkeypatch):
    """What is built from here on, by name."""
    found = []

    def record(module, function, name):
        original = getattr(module, function)

        def recorded(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, recorded)

    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    build._build.cache_clear()
    host._planned.cache_clear()
    record(build, "make_stack", "model")
    for module in (fit, host, trial):
        record(module, "make_plan", module.__name__.rpartition(".")[2])
    record(plans, "make_plan", "report")
    return found


def test_a_run_builds_its_model_and_its_plan_once(built, tmp_path):
    """Fails if the command, the proposal of a mesh and the run each build a model. The
    limit of pinned memory takes a plan of its own: JAX reads it before there are
    devices, and so before there is their mesh."""
    settings = ("mesh=auto", "zero.offload=pinned_host")
    limit_pinned_pool(small_run.make_config(tmp_path, *settings))  # as `zjax train`
    small_run.make_trainer(tmp_path, *settings).close()
    assert built.count("model") == 1
    assert (built.count("host"), built.count("fit")) == (1, 1)


@pytest.mark.parametrize("memory", ["none", "auto"])
def test_a_report_plans_each_stage_once(built, memory, tmp_path):
    """Fails if the plan of the run is made beside that of its ZeRO stage."""
    config = small_run.make_config(tmp_path, f"zero.offload={memory}")
    report_plan(config, picture=str(tmp_path / "plan.png"))
    assert built.count("model") == 1
    assert (built.count("report"), built.count("fit")) == (4, 0)
