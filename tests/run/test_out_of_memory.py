"""What a user reads where a step asks for more memory than the devices have."""

import jax
import optax
import pytest

import zjax.run.step
from tests.support import models, small_run
from zjax.config import load_config
from zjax.errors import PlanError
from zjax.run.fit import explain_out_of_memory
from zjax.sharding import plan as plans
from zjax.sharding.mesh import make_mesh
from zjax.sharding.plan import make_plan

ASKED = "Out of memory while trying to allocate 12.00GiB"


@pytest.fixture
def exhausted(monkeypatch):
    def call(*_):
        error = f"RESOURCE_EXHAUSTED: {ASKED}.\nBufferAssignment OOM Debugging"
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(zjax.run.step.Step, "__call__", call)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        pytest.param(
            (),
            "set microbatch_size=1 (the batch stays, in more microbatches) or "
            "model.remat=full or zero.stage=3 or zero.offload=pinned_host, "
            "or ",
            id="much",
        ),
        pytest.param(
            (
                "global_batch_size=8",
                "model.remat=full",
                "zero.stage=3",
                "zero.offload=pinned_host",
                "model.embed_size=512",
                "model.mlp_size=2048",
            ),
            "set zero.offload.parameter_memory=pinned_host, or ",
            id="little",
        ),
        pytest.param(
            (
                "global_batch_size=8",
                "num_microbatches=4",
                "mesh.pipeline=4",
                "model.num_layers=4",
            ),
            "set model.remat=full or zero.stage=3, or ",
            id="stages",
        ),
    ],
)
def test_remedies_are_what_is_not_done_yet(tmp_path, exhausted, settings, remedy):
    trainer = small_run.make_trainer(tmp_path, *settings)
    with pytest.raises(PlanError) as error:
        trainer.fit()
    size = trainer.config.microbatch_size
    assert str(error.value) == (
        f"microbatch_size={size} takes more memory than devices have ({ASKED}); "
        f"{remedy}use more devices, or a smaller model"
    )
    trainer.close()


def told(error, memory="pinned_host"):
    """What is raised of a model of one's own on one device."""
    config = load_config({"zero.offload": memory}, global_batch_size=1)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    plan = make_plan(config, mesh, models.make_mlp(), optax.sgd(0.1, momentum=0.9))
    with (
        pytest.raises((jax.errors.JaxRuntimeError, PlanError)) as found,
        explain_out_of_memory(config, plan, user_model=True),
    ):
        raise jax.errors.JaxRuntimeError(error)
    return found.value


@pytest.mark.parametrize(
    ("memory", "remedy"),
    [
        (None, "set zero.offload=pinned_host, or use more devices"),
        ("pinned_host", "use more devices"),
    ],
)
def test_a_model_of_your_own_reads_no_settings_of_models(monkeypatch, memory, remedy):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1)
    error = told(f"RESOURCE_EXHAUSTED: {ASKED}.", memory)
    assert str(error) == (
        f"microbatch_size=1 takes more memory than devices have ({ASKED}); "
        f"{remedy}, or a smaller model"
    )


def test_other_errors_of_devices_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1)
    error = told("INTERNAL: lost")
    assert (type(error), str(error)) == (jax.errors.JaxRuntimeError, "INTERNAL: lost")
