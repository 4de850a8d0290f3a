"""What replicas keep for their exchanges is counted as it lies on the devices."""

import re

import pytest

from tests.support import small_run
from zjax.cli.bench import state_bytes
from zjax.errors import PlanError
from zjax.estimate.tables import describe_stages, kept_rows
from zjax.estimate.trial import weigh
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.batch import abstract_batch
from zjax.run.fit import check_device_memory
from zjax.run.plan_report import report_plan
from zjax.sharding import memory

MESH = ("mesh.replica=2", "mesh.data=2", "zero.stage=1", "model.dropout_rate=0.0")
DILOCO = (
    "communication.local_steps.num_steps=4",
    "communication.local_steps.num_fragments=2",
    "communication.local_steps.delay=1",
    "communication.codec=int4",
)
ONE_BIT = ("optimizer.rule=onebit_adam", "optimizer.rule.freeze_step=3")
COUNTERS = 64
"""Bytes of the numbers of steps, at most."""


@pytest.fixture(params=[DILOCO, DILOCO[:2], ONE_BIT], ids=["diloco", "exact", "onebit"])
def run(request, tmp_path):
    settings = (*MESH, *request.param)
    return small_run.make_trainer(tmp_path, *settings, num_devices=4).run


def test_bytes_of_a_plan_are_those_on_a_device(run):
    """Fails if the anchor, a momentum, an error or a mean on its way is left out."""
    kept = kept_rows(run.plan, run.config)
    planned = memory.plan_bytes(run.plan, kept).optimizer
    found = state_bytes(run.state, run.mesh.local_devices[0])
    assert 0 <= found - planned < COUNTERS


def test_the_peak_of_a_step_has_the_whole_state_once(run):
    """Fails if what a local step does not read is taken off the batch."""
    batch = abstract_batch(run.config, run.plan)
    parts = run.step.predict_peak(batch).parts
    assert parts["state"] == state_bytes(run.state, run.mesh.local_devices[0])
    assert parts["batch"] == sum(4 * x.size for x in batch.values()) // 4


def test_local_steps_keep_eight_bytes_of_a_parameter_and_more_with_a_delay(tmp_path):
    """Of an anchor and its momentum; with a delay four of a mean; four of errors."""
    sizes = {}
    for name, settings in (("exact", DILOCO[:2]), ("delayed", DILOCO[:3])):
        settings = (*MESH, "zero.min_shard_elements=0", *settings)
        run = small_run.make_trainer(tmp_path, *settings, num_devices=4).run
        kept = kept_rows(run.plan, run.config)
        sizes[name] = memory.tree_bytes(kept) / memory.num_params(run.plan)
    assert sizes["exact"] == pytest.approx(8 / 2, rel=0.02)
    assert sizes["delayed"] == pytest.approx(12 / 2, rel=0.02)


def test_a_device_too_small_for_what_replicas_keep_is_refused(run):
    kept = kept_rows(run.plan, run.config)
    needed = memory.plan_bytes(run.plan, kept).total
    check_device_memory(run.plan, needed, kept)
    with pytest.raises(PlanError) as error:
        check_device_memory(run.plan, needed - 1, kept)
    assert str(error.value).endswith(
        "; raise zero.stage, use more devices, or a smaller model"
    )


def test_a_step_by_formula_counts_it(run):
    config = run.config
    model = make_model(config)
    mesh = weigh(config, config.mesh, model, make_optimizer(config, model))
    planned = memory.plan_bytes(run.plan, kept_rows(run.plan, config))
    gradients = memory.tree_bytes(run.plan.grads)
    assert mesh.state == planned.parameters + planned.optimizer + gradients


def test_a_plan_tells_what_replicas_keep(tmp_path):
    config = small_run.make_config(tmp_path, *MESH, *DILOCO)
    text = report_plan(config, num_devices=4, picture=str(tmp_path / "plan.png"))
    for name in ("anchor", "outer momentum", "errors of the codec", "means on their"):
        assert re.search(rf"^{name} .* kB +.* kB", text, re.MULTILINE), name


@pytest.mark.parametrize("settings", [DILOCO, ONE_BIT], ids=["diloco", "onebit"])
def test_the_closed_form_of_stage_0_has_all_of_it(tmp_path, settings):
    settings = (*MESH, *settings, "zero.stage=0")
    run = small_run.make_trainer(tmp_path, *settings, num_devices=4).run
    kept = kept_rows(run.plan, run.config)
    *_, line = describe_stages([run.plan], [kept]).splitlines()
    total, closed = re.findall(r"[\d.]+ kB", line)[-2:]
    assert total == closed
