"""Bytes of a critic and of a reference, against the bytes that a run of them holds."""

import dataclasses
import math

import jax
import pytest

from tests.support import rl_run
from tests.support.refusals import plan_error
from zjax.config import load_config
from zjax.errors import PlanError
from zjax.estimate import models
from zjax.estimate.trial import weigh
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run import fit
from zjax.run.fit import check_device_memory
from zjax.run.pinned_pool import pinned_bytes
from zjax.run.plan_report import report_plan
from zjax.sharding import memory
from zjax.sharding.memory import MemoryBytes

SETTINGS = (
    "rl.objective=ppo",
    "rl.critic=own",
    "rl.reference=reward",
    "precision.compute_dtype=bfloat16",
)


def device_bytes(tree):
    """Bytes of the shards on the first device or on the host beside it."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def weighed(config, num_devices=2):
    config = models.with_closed_mesh(config, num_devices)
    model = make_model(config)
    tx = make_optimizer(config, model)
    return models.weigh_models(config, model, tx), weigh(config, config.mesh, model, tx)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A policy on two devices with a critic and a reference, before the first step."""
    directory = tmp_path_factory.mktemp("models")
    start = rl_run.make_trainer(directory / "start", num_devices=2)
    start.save()
    start.close()
    given = *SETTINGS, f"checkpoint.init_from={directory / 'start'}"
    trainer = rl_run.make_trainer(directory / "run", *given, num_devices=2)
    yield trainer
    trainer.close()


def test_models_hold_the_bytes_that_are_counted(run):
    """Fails if the critic, the optimizer state or the reference is left out."""
    (policy, critic, reference), _ = weighed(run.config)
    states = [(policy, run.state, run.run.plan)]
    states += [(critic, run._critic.state, run._critic.run.plan)]
    for counted, state, plan in states:
        assert counted.held == (device_bytes((state.master, state.opt_state)), 0, 0)
        # A step adds parameters in use and their gradients.
        more = memory.tree_bytes((plan.compute, plan.grads))
        assert counted.working == counted.held.device + more
    assert critic.held.device > policy.held.device
    copy = run._tokens._reference
    assert reference.held == (device_bytes(copy._params), 0, 0)
    assert reference.working == copy.num_bytes > 0


def test_a_reference_on_the_host_takes_no_device_between_passes(run):
    config = load_config(run.config, "rl.reference.memory=pinned_host")
    _, _, reference = weighed(config)[0]
    assert reference.held == (0, run._tokens._reference.num_bytes, 0)
    assert pinned_bytes(config, 2) - pinned_bytes(run.config, 2) == reference.held.host
    adapters = load_config(run.config, "lora.rank=2")
    assert [x.name for x in weighed(adapters)[0]] == ["policy", "critic"]


def test_a_step_of_one_model_leaves_the_others_where_they_are(run):
    """Fails if a mesh is chosen by the policy alone."""
    found, trial = weighed(run.config)
    policy, critic, reference = found
    held = policy.held.device + reference.held.device
    assert trial.state == critic.working + held
    plain = dataclasses.replace(run.config, rl=None)
    assert weighed(plain)[1].state == policy.working


def test_a_plan_names_critic_and_reference(run, tmp_path):
    text = report_plan(run.config, num_devices=2, picture=str(tmp_path / "plan.png"))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    critic = models.format_bytes(weighed(run.config)[0][1].working)
    assert lines["critic"].endswith(critic)
    assert lines["reference"]


def test_state_that_fits_without_a_critic_alone_is_refused(run):
    plan = run.run.plan
    needed = memory.plan_bytes(plan).total
    check_device_memory(plan, needed + 10**9, beside=10**9)
    told = "zero.stage=1 needs 1.0 GB of model state (1.0 GB of critic and reference) "
    told += "on devices of 1.0 GB; raise zero.stage, set zero.offload=pinned_host, use "
    with plan_error(f"{told}more devices, or a smaller model"):
        check_device_memory(plan, needed + 10**9 - 1, beside=10**9)


def test_a_run_counts_its_critic_before_it_compiles(run, tmp_path, monkeypatch):
    """Fails if a policy fits that leaves the critic no room."""
    room = memory.plan_bytes(run.run.plan).total
    monkeypatch.setattr(fit, "device_capacity_bytes", lambda mesh: room)
    with pytest.raises(PlanError, match="of critic and reference"):
        rl_run.make_trainer(tmp_path, *SETTINGS[:2], SETTINGS[3], num_devices=2)


def test_the_peak_is_of_the_model_that_takes_most():
    small, large = MemoryBytes(3, 50, 0), MemoryBytes(5, 0, 7)
    found = [models.ModelBytes("a", small, 20), models.ModelBytes("b", large, 6)]
    assert models.peak_bytes(found) == 25
    assert models.add_held(found) == (8, 50, 7)
    assert models.add_held([]) == (0, 0, 0)
    assert math.prod(models.held_beside(load_config({}), 2)) == 0
