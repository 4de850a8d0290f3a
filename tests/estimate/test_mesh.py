"""The plainest mesh that fits, and bytes of a step on a mesh."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zjax
from tests.support import small_run
from tests.support.proposals import config_of, machine_of
from tests.support.refusals import config_error, plan_error
from zjax.config import load_config
from zjax.errors import ConfigError, PlanError
from zjax.estimate import mesh
from zjax.estimate.mesh import propose_mesh, this_machine
from zjax.estimate.tables import DEVICE_SHARE, describe_stages
from zjax.estimate.trial import Machine, weigh
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan

ONE, THREE = ({"zero.stage": stage} for stage in (1, 3))
CASES = [
    ("gpt 1.5b", 64, 80, {}, {"data": 64}),
    ("gpt 6.7b", 4, 80, {}, {"data": 4}),
    ("llama 8b", 8, 80, {}, {"data": 8}),
    ("llama 8b", 8, 80, ONE, {"data": 4, "tensor": 2}),
    ("llama 8b", 8, 141, ONE, {"data": 8}),
    ("llama 8b, long", 8, 80, {}, {"data": 4, "sequence": 2}),
    ("llama 8b, long", 8, 141, {}, {"data": 8}),
    ("llama 30b", 8, 141, THREE, {"data": 8}),
    ("llama 30b", 16, 80, ONE, {"pipeline": 4, "data": 1, "tensor": 4}),
    ("llama 30b", 64, 80, ONE, {"pipeline": 2, "data": 8, "tensor": 4}),
    ("llama 30b", 16, 141, ONE, {"data": 4, "tensor": 4}),
    ("llama 30b, offload", 1, 80, {}, {"data": 1}),
    ("llama 70b", 16, 141, {}, {"data": 8, "tensor": 2}),
    ("llama 70b", 64, 80, {}, {"data": 32, "sequence": 2}),
    ("llama 70b", 64, 80, ONE, {"pipeline": 4, "data": 2, "tensor": 8}),
    ("llama 70b", 64, 141, ONE, {"data": 8, "tensor": 8}),
]


@pytest.mark.parametrize(("shape", "num_devices", "gb", "changes", "sizes"), CASES)
def test_plainest_mesh_that_fits(shape, num_devices, gb, changes, sizes):
    config, machine = config_of(shape, changes), machine_of(num_devices, gb)
    proposal = propose_mesh(config, machine)
    assert proposal.mesh == schema.Mesh(**sizes)
    *plainer, taken = proposal.trials
    assert taken.total <= 0.94 * machine.device_bytes
    assert all(x.obstacle or x.total > 0.94 * machine.device_bytes for x in plainer)
    chosen = dataclasses.replace(config, mesh=proposal.mesh)
    zjax.check_config(chosen, num_devices)


def test_tensor_stays_within_a_host():
    """Fails if matrices are split over slow links."""
    config = config_of("llama 70b", ONE)
    proposal = propose_mesh(config, machine_of(64, 141, per_host=4))
    assert proposal.mesh.tensor == 4
    assert all(trial.mesh.tensor <= 4 for trial in proposal.trials)


def test_heads_say_how_wide_tensor_may_be():
    """52 heads go on 4 devices, not on 8; stages do the rest."""
    config = config_of("llama 30b", ONE)
    trials = propose_mesh(config, machine_of(16, 80)).trials
    obstacles = {trial.obstacle for trial in trials if trial.obstacle}
    assert obstacles == {"tensor=8 does not divide model.num_heads=52"}
    heads = {"num_heads": 24, "num_kv_heads": 3, "embed_size": 3072}
    config = config_of("llama 8b", ONE, {"model": heads})
    trials = propose_mesh(config, machine_of(8, 30)).trials
    assert trials[1].obstacle == (
        "tensor=2 does not divide model.num_kv_heads=3 of 24 heads"
    )


def test_stages_need_layers_and_microbatches():
    """Fails if stages would idle for most of a step, or hold unequal layers."""
    batch = {"microbatch_size": 1, "global_batch_size": 0}
    config = config_of("llama 30b", ONE, batch, {"num_microbatches": 4})
    assert propose_mesh(config, machine_of(64, 40)).mesh.pipeline == 4
    config = load_config(config, num_microbatches=3)
    with pytest.raises(PlanError) as error:
        propose_mesh(config, machine_of(64, 40))
    assert ", more microbatches, more devices or " in str(error.value)
    layers = config_of("llama 30b", ONE, {"model.num_layers": 61})
    with pytest.raises(PlanError) as error:
        propose_mesh(layers, machine_of(64, 70))
    assert "with --config.mesh.data=16 --config.mesh.tensor=4; " in str(error.value)


def test_what_is_given_stays():
    """Fails if an axis that the config sets is chosen again."""
    config = config_of("llama 8b", {"mesh.tensor": 4, "mesh.replica": 2})
    mesh = propose_mesh(config, machine_of(16, 80)).mesh
    assert mesh == schema.Mesh(replica=2, data=2, tensor=4)


def test_batch_that_data_cannot_split_is_split_otherwise():
    small = {"global_batch_size": 4, "zero.stage": 1}
    proposal = propose_mesh(config_of("gpt 6.7b", small), machine_of(8, 141))
    assert proposal.mesh == schema.Mesh(data=2, tensor=4)
    assert proposal.trials[0].obstacle == (
        "global_batch_size=4 does not divide by 8 batch shards x microbatch_size=2"
    )


def test_settings_and_batches_that_no_mesh_can_mend_are_named():
    """Fails if what is wrong elsewhere is told as if there were no room."""
    config = config_of("gpt 6.7b", {"model.num_heads": 0, "seed": -1})
    with config_error(
        "seed=-1 is out of range; use 0 to 4294967295\n"
        "model.num_heads=0 is out of range; use 1 or more"
    ):
        propose_mesh(config, machine_of(8, 80))
    changes = {"global_batch_size": 2, "microbatch_size": 1}
    config = config_of("llama 30b", changes)
    with config_error(
        "global_batch_size=2 does not divide by 16 batch shards x "
        "microbatch_size=1; use a multiple of 16"
    ):
        propose_mesh(config, machine_of(16, 80))


@pytest.mark.parametrize(
    ("shape", "num_devices", "changes", "message"),
    [
        (
            "gpt 6.7b",
            1,
            {},
            "mesh='auto' finds no room on 1 x 80.0 GB: a step takes 128.1 GB (state "
            "121.6 GB, activations 6.5 GB) with --config.mesh.data=1; use "
            "zero.offload='pinned_host', more devices or a smaller model",
        ),
        (
            "llama 70b",
            8,
            ONE,
            "mesh='auto' finds no room on 8 x 80.0 GB: a step takes 185.2 GB (state "
            "176.4 GB, activations 8.8 GB) with --config.mesh.tensor=8; use a higher "
            "zero.stage, zero.offload='pinned_host', more devices or a smaller model",
        ),
        (
            "llama 8b",
            4,
            {"microbatch_size": 16, "global_batch_size": 256},
            "mesh='auto' finds no room on 4 x 80.0 GB: a step takes 92.5 GB (state "
            "36.9 GB, activations 55.6 GB) with --config.mesh.tensor=4; use "
            "zero.offload='pinned_host', model.remat='full', a smaller "
            "microbatch_size, more devices or a smaller model",
        ),
    ],
)
def test_no_room_states_the_numbers_and_the_remedy(
    shape, num_devices, changes, message
):
    with plan_error(message):
        propose_mesh(config_of(shape, changes), machine_of(num_devices, 80))


def test_optimizer_of_yours_counts_as_it_is():
    """Fails if the state of an optimizer is taken for that of the config; plain SGD
    has none, and needs no matrices in parts."""
    rate = {"optimizer.peak_learning_rate": 3e-4}
    config, machine = config_of("gpt 6.7b", ONE, rate), machine_of(4, 80)
    assert propose_mesh(config, machine).mesh == schema.Mesh(data=2, tensor=2)
    own = propose_mesh(config, machine, optax.sgd(0.1))
    assert own.mesh == schema.Mesh(data=4)
    moved = load_config(config, {"optimizer.rule.b1": 0.5})
    with pytest.raises(ConfigError, match=r"optimizer\.rule\.b1=0\.5 "):
        propose_mesh(moved, machine, optax.sgd(0.1))


def test_devices_that_do_not_say_their_memory_fit_everything():
    machine = this_machine(jax.devices()[:4])
    assert machine == Machine(4, 4, float("inf"))
    proposal = propose_mesh(config_of("llama 70b"), machine)
    assert proposal.mesh == schema.Mesh(data=4)
    assert proposal.reasons[0] == (
        "The memory of these devices is not known: every mesh is assumed to fit."
    )


def test_trainer_trains_on_the_proposal_and_says_it_once(tmp_path, caplog):
    """Fails if the mesh stays open, or the reasons are lost or repeated."""
    trainer = small_run.make_trainer(tmp_path, "mesh=auto", "num_steps=2")
    assert trainer.config.mesh == schema.Mesh(data=8)
    trainer.fit()
    trainer.close()
    said = [line for line in caplog.messages if "--config.mesh.data=8" in line]
    assert len(said) == 1


def own_run(wide):
    """A model of a user without dim names, its batch, and an optimizer."""

    def init(key):
        return {"w": jnp.zeros((wide, wide))}

    def apply(params, x):
        return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"])

    def loss_fn(model, batch, key):
        return jnp.mean(model(batch["x"]) ** 2)

    batch = {"x": jnp.ones((8, 64, wide))}
    return (init, apply), optax.sgd(0.1), loss_fn, batch


def test_a_mesh_for_a_model_of_yours(monkeypatch):
    """Fails if its activations do not count, or if an axis without use is proposed."""
    model, tx, loss_fn, batch = own_run(16)
    own = zjax.adapt(model, loss_fn, batch), batch
    settings = {"mesh": "auto", "global_batch_size": 8, "microbatch_size": 1}
    config = load_config(settings)
    trial = propose_mesh(config, machine_of(8, math.inf), tx, own).trials[0]
    row = {"x": jax.ShapeDtypeStruct((1, 64, 16), "float32")}
    cost = zjax.count(own[0], row, dtype=config.precision.compute_dtype)
    assert trial.of_one == cost.activation_bytes

    def start(part):
        usable = trial.state + part * trial.of_one
        machine = Machine(8, 8, usable / DEVICE_SHARE)
        monkeypatch.setattr(mesh, "this_machine", lambda _: machine)
        return zjax.initialize(model, tx, loss_fn, batch, settings)

    # No dim has a name for `tensor`, and no stack has stages.
    for part, expected in ((1.1, {"data": 8}), (0.6, {"data": 4, "sequence": 2})):
        sizes = start(part).plan.mesh.shape
        assert {axis: size for axis, size in sizes.items() if size > 1} == expected
    with pytest.raises(PlanError, match="mesh='auto' finds no room") as error:
        start(0.01)
    assert "remat" not in str(error.value)


def weighed(shape, changes, **mesh):
    config = config_of(shape, changes, {"global_batch_size": 0})
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    number = sum(x.size for x in jax.tree.leaves(params))
    trial = weigh(config, schema.Mesh(**mesh), model, make_optimizer(config, model))
    return trial, number


@pytest.mark.parametrize(
    ("stage", "measured_gb"), [(2, 60.06), (3, 52.21)], ids=["zero-2", "zero-3"]
)
def test_bytes_are_those_that_were_measured(stage, measured_gb):
    """Peaks of GPT 6.7B on four H200s, from BENCHMARKS.md; we foretell a tenth more."""
    changes = {"zero.stage": stage, "model.remat": "elementwise"}
    trial, _ = weighed("gpt 6.7b", changes, data=4)
    assert 1 <= trial.total / 1e9 / measured_gb < 1.11


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "mesh", "per_param"),
    [
        (0, 1, {"data": 4}, 12 + 4 + 2),
        (1, 1, {"data": 4}, (12 + 4) / 4 + 2),
        (1, 8, {"data": 4}, 12 / 4 + 4 + 2 + 2),
        (2, 8, {"data": 4}, (12 + 4) / 4 + 2),
        (1, 8, {"data": 2, "tensor": 2}, (12 / 2 + 4 + 2 + 2) / 2),
        (1, 8, {"pipeline": 2, "data": 2}, (12 / 2 + 2 * 4 + 3 * 2) / 2),
    ],
)
def test_state_per_parameter(stage, num_microbatches, mesh, per_param):
    """Fails if sums of gradients, gradients beside them, or what stages lay out anew
    are left out; 12 of Adam and 4 of a sum in float32, 2 of a number in bfloat16."""
    changes = {"zero.stage": stage, "num_microbatches": num_microbatches}
    trial, number = weighed("gpt 6.7b", changes, **mesh)
    assert trial.state / number == pytest.approx(per_param, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "mesh", "per_frozen", "per_learned"),
    [
        (1, {"data": 4}, 2, 12 / 4 + 4 + 2 + 2),
        (2, {"data": 4}, 2, (12 + 4) / 4 + 2),
        (1, {"pipeline": 2, "data": 2}, 4 / 2, (12 / 2 + 2 * 4 + 3 * 2) / 2),
    ],
)
def test_frozen_parameters_count_once_in_the_compute_dtype(
    stage, mesh, per_frozen, per_learned
):
    """Fails if a frozen weight counts as one with a master, moments or a gradient."""
    changes = {"zero.stage": stage, "num_microbatches": 8, "lora.rank": 8}
    trial, number = weighed("gpt 6.7b", changes, **mesh)
    layers, width = 32, 4096
    learned = layers * 8 * (4 * 2 * width + 2 * 5 * width)
    expected = per_frozen * (number - learned) + per_learned * learned
    assert trial.state == pytest.approx(expected, rel=0.01)


def test_closed_form_counts_frozen_parameters_once():
    """Fails if the form beside the table adds masters that frozen weights lack."""
    config = config_of("gpt 6.7b", {"zero.stage": 0, "lora.rank": 8}, {})
    model, mesh = make_model(config), abstract_mesh(schema.Mesh(data=4), 4)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    (row,) = (x for x in describe_stages([plan], [()]).splitlines() if " GB" in x)
    *_, total, form = re.findall(r"[\d.]+ GB", row)
    assert total == form
