"""Stacked layers: stored as one array, gathered and differentiated one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zjax
from tests.support import language
from tests.support.refusals import model_error
from tests.support.steps import make_step
from zjax.models.build import make_model
from zjax.observe.collectives import list_collectives
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.sharding.layers import Layers, layers_of, put_together, take_apart
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import layerwise_plan

SHAPE = language.GPT
TABLE = SHAPE.vocab_size * SHAPE.embed_size
"""Elements of the largest array but for stacks: more than any matrix of one layer."""


def make_config(stage, num_microbatches=1, **model):
    return schema.Config(
        global_batch_size=16,
        num_microbatches=num_microbatches,
        zero=schema.Zero(stage=stage, min_shard_elements=0),
        precision=schema.Precision(compute_dtype="float32"),
        model=dataclasses.replace(SHAPE, **model),
        optimizer=schema.Optimizer(
            schedule=schema.Cosine(num_warmup_steps=1), peak_learning_rate=0.01
        ),
        data=schema.Data(source="synthetic", length=8),
    )


def make_language_run(stage, num_devices=8, num_microbatches=1, **model):
    config = make_config(stage, num_microbatches, **model)
    model, devices = make_model(config), jax.devices()[:num_devices]
    return make_run(config, model, make_optimizer(config, model), devices=devices)


def make_language_plan(stage, min_shard_elements):
    zero = schema.Zero(stage=stage, min_shard_elements=min_shard_elements)
    config = schema.Config(model=SHAPE, data=schema.Data(length=8), zero=zero)
    model, mesh = make_model(config), meshes.make_mesh(config.mesh)
    return plans.make_plan(config, mesh, model, make_optimizer(config, model))


def run_of(config, tx, num_devices):
    """A run of a user's optimizer."""
    devices = jax.devices()[:num_devices]
    return zjax.initialize(
        make_model(config), tx, None, make_batch(), config, devices=devices
    )


def make_batch():
    tokens = np.random.default_rng(0).integers(0, 29, (16, 9), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_layers_are_slices_and_go_back():
    stacked = {"w": jnp.arange(12.0).reshape(3, 2, 2), "b": jnp.ones(5)}
    rows = {"w": Layers([0] * 3), "b": 0}
    apart = take_apart(stacked, rows)
    assert [x.tolist() for x in apart["w"]] == stacked["w"].tolist()
    assert apart["b"] is stacked["b"]
    jax.tree.map(np.testing.assert_array_equal, put_together(apart), stacked)


@pytest.mark.parametrize("is_apart", [False, True])
def test_layers_have_the_gradients_of_their_stack(is_apart):
    stacked = jnp.arange(6.0).reshape(3, 2)
    w = Layers(stacked) if is_apart else stacked

    def loss(w):
        return sum(
            (i + 1) * (x["w"] ** 2).sum() for i, x in enumerate(layers_of({"w": w}, 3))
        )

    grads = jax.grad(loss)(w)
    assert isinstance(grads, Layers) == is_apart
    expected = 2 * stacked * np.array([[1.0], [2.0], [3.0]])
    np.testing.assert_allclose(jnp.stack(list(grads)), expected)


def test_a_layer_has_the_place_of_its_stack():
    run = make_language_run(2)
    row = run.plan.master["blocks"]["mlp"]["up"]["kernel"]
    assert (row.shape, row.spec, row.num_layers) == (
        (2, 16, 24),
        P(None, "data", None),
        2,
    )
    assert row.layer == ArrayPlan(
        row.path, (16, 24), row.dtype, row.layer.stored, row.layer.used
    )
    assert row.layer.spec == P("data", None)
    layerwise = layerwise_plan(make_model(run.config), run.plan)
    assert layerwise.master["blocks"]["mlp"]["up"]["kernel"] == (row.layer,) * 2
    assert layerwise.opt_state is run.plan.opt_state


def test_small_layers_stay_whole_however_many_there_are():
    """Fails if the threshold counts the stack."""
    block = make_language_plan(1, min_shard_elements=16 * 24).master["blocks"]
    assert block["mlp"]["up"]["kernel"].spec == P(None, "data", None)
    assert set(block["attention"]["query"]["kernel"].spec) == {None}  # 16 x 16


@pytest.mark.parametrize(("stage", "is_apart"), [(0, True), (1, False)])
def test_layers_that_are_not_split_stay_stacked(stage, is_apart):
    """At stage 0 nothing is split, and sums of gradients need not wait for the last."""
    plan = make_language_plan(stage, min_shard_elements=10**6)
    layerwise = layerwise_plan(make_model(schema.Config(model=SHAPE)), plan)
    trees = layerwise.master, layerwise.compute, layerwise.grad_sum, layerwise.grads
    for rows in trees:
        assert isinstance(rows["blocks"]["mlp"]["up"]["kernel"], Layers) == is_apart


@pytest.mark.parametrize(
    ("stage", "separable"),
    [
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        (3, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        (2, False),
    ],
)
def test_every_layer_is_gathered_alone(stage, separable):
    """Fails if layers are not taken apart, by hand or by the compiler."""
    config = make_config(stage, dropout_rate=0.1)
    model = dataclasses.replace(make_model(config), separable=separable)
    text = make_step(config, model=model).compile(make_batch()).as_text()
    gathers = [each for each in list_collectives(text) if each.op == "all-gather"]
    assert gathers
    assert max(each.elements for each in gathers) == TABLE


@pytest.mark.parametrize(
    "tx",
    [optax.lamb(1e-2), pytest.param(optax.contrib.muon(1e-2), marks=pytest.mark.slow)],
)
def test_your_optimizer_sees_layers_on_any_devices_and_in_a_trainer(tx, tmp_path):
    """Fails where the stack is measured as one array, or a shard of it is."""
    config = dataclasses.replace(make_config(2), optimizer=schema.Optimizer())
    runs = [run_of(config, tx, 1), run_of(config, tx, 8)]
    trainer = zjax.Trainer(
        dataclasses.replace(config, directory=str(tmp_path), num_steps=3),
        model=make_model(config),
        tx=tx,
        batches=[make_batch()] * 3,
    )
    runs.append(trainer.run)
    runs.append(make_run(config, make_model(config), tx, devices=jax.devices()[:1]))
    kernels = []
    for run in runs:
        state = run.state
        for _ in range(3):
            state, _ = run.step(state, make_batch())
        kernels.append(np.asarray(state.master["blocks"]["mlp"]["up"]["kernel"]))
    trainer.close()
    alone, everywhere, trained, as_one_array = kernels
    wrong = np.abs(as_one_array - alone).max()
    assert wrong > 1e-5
    np.testing.assert_allclose(everywhere, alone, atol=wrong / 10)
    np.testing.assert_allclose(trained, alone, atol=wrong / 10)


def test_factors_of_layers_are_split_within_layers():
    """Fails if ZeRO gives whole layers of a factored moment to one device."""
    config = dataclasses.replace(
        make_config(1, num_layers=8, embed_size=256, mlp_size=384),
        optimizer=schema.Optimizer(rule=schema.Adafactor()),
    )
    model, mesh = make_model(config), meshes.make_mesh(config.mesh)
    plan = plans.make_plan(config, mesh, model, make_optimizer(config, model))
    rows = [row for row in jax.tree.leaves(plan.opt_state) if "mlp/up" in row.path]
    assert {row.shape for row in rows} >= {(8, 256), (8, 384)}
    assert all(row.spec[0] is None for row in rows if row.spec)


def test_another_number_of_layers_is_refused():
    stacked = {"w": jnp.ones((3, 2))}
    with model_error(
        "layers=3 are not the 2 of the model; use the model that these parameters were "
        "made for"
    ):
        layers_of(stacked, 2)


@pytest.mark.parametrize(
    ("stage", "num_microbatches"),
    [
        (0, 2),
        (3, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_one_device(stage, num_microbatches):
    def losses(num_devices, stage, num_microbatches):
        run = make_language_run(stage, num_devices, num_microbatches)
        state, found = run.state, []
        for _ in range(5):
            state, metrics = run.step(state, make_batch())
            found.append(float(metrics["loss"]))
        return found

    alone = losses(1, 0, 1)
    assert alone[-1] < alone[0] - 1e-3
    np.testing.assert_allclose(losses(8, stage, num_microbatches), alone, rtol=1e-5)
