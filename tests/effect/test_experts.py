"""What the batch splits stays split, and tokens are exchanged as often as needed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import runs, tensor
from zjax.errors import PlanError
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.observe.communication import zero_volume
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan
from zjax.typing import Loss, Model

EXPERTS, WIDTH, OUT, ROWS = 2, 6, 7, 16
MESH = schema.Mesh(data=4, expert=2)
RATE, STEPS = 0.5, 3


def values(num_experts=EXPERTS):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(num_experts, WIDTH, OUT)).astype(np.float32)
    return {"kernel": kernel, "bias": np.zeros(WIDTH, np.float32)}


def make_model(num_experts=EXPERTS):
    """One expert for the rows of a device, and a bias that all of them share."""

    def loss(params, model_state, batch, key):
        kernel = jnp.mean(params["kernel"], 0)
        error = (batch["x"] + params["bias"][None]) @ kernel - batch["y"]
        return Loss(jnp.mean(error**2), jnp.float32(len(error)), model_state, {})

    return Model(
        init=lambda key: (jax.tree.map(jnp.asarray, values(num_experts)), {}),
        loss=loss,
        bind=lambda params, model_state: None,
        logical=lambda params: {"kernel": ("experts", None, None), "bias": ()},
        separable=True,
    )


def make_batch(step):
    rng = np.random.default_rng(1 + step)
    x, y = (rng.normal(size=(ROWS, n)).astype(np.float32) for n in (WIDTH, OUT))
    return {"x": x, "y": y}


def make_run(stage, num_microbatches=1, make=runs.make_small_run):
    return make(
        optax.sgd(RATE),
        stage,
        mesh=MESH,
        model=make_model(),
        num_microbatches=num_microbatches,
        optimizer=schema.Optimizer(clip_norm=float("inf")),
    )


def expected_losses():
    """Of SGD on one device: neighbouring devices, of two rows each, take turns."""
    params = {name: x.astype(np.float64) for name, x in values().items()}
    of_row = np.arange(ROWS) // (ROWS // 8) % EXPERTS
    losses = []
    for step in range(STEPS):
        batch = make_batch(step)
        x, kernels = batch["x"] + params["bias"], params["kernel"][of_row]
        error = np.einsum("ri,rio->ro", x, kernels) - batch["y"]
        losses.append(np.mean(error**2))
        cotangent = 2 * error / error.size
        for expert in range(EXPERTS):
            rows = of_row == expert
            params["kernel"][expert] -= RATE * x[rows].T @ cotangent[rows]
        params["bias"] -= RATE * np.einsum("ro,rio->i", cotangent, kernels)
    return losses, params


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_learn_from_the_rows_of_their_devices_alone(stage, num_microbatches):
    """Fails if gradients of experts are added up over all devices."""
    run = make_run(stage, num_microbatches)
    state, losses = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, make_batch(step))
        losses.append(float(metrics["loss"]))
    expected, params = expected_losses()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, x in params.items():
        found = np.asarray(state.master[name])[tuple(map(slice, x.shape))]
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kernels_of_experts_never_cross_to_other_experts(stage):
    """Fails if they are gathered for use, or gradients reduced, over `expert`."""
    step = make_run(stage, make=runs.make_small_step)
    batch = jax.eval_shape(lambda: make_batch(0))
    found = list_collectives(step.compile(batch).as_text())
    kernels = [each for each in found if each.elements >= WIDTH * OUT]
    axes = {(each.op, mesh_axes(each.groups, step.plan.mesh)) for each in kernels}
    gathers = {("all-gather", ("data",))} if stage else set()
    reduction = "reduce-scatter" if stage else "all-reduce"
    assert axes == gathers | {(reduction, ("data",))}
    alone = dataclasses.replace(
        step.plan,
        master=step.plan.master["kernel"],
        grads=step.plan.grads["kernel"],
        compute=step.plan.compute["kernel"],
    )
    volume = sum(each.volume for each in kernels)
    # Some compilers see that the second gather of stage 3 gives what the first gave.
    once = dataclasses.replace(alone, stage=min(stage, 2))
    assert volume in (zero_volume(alone, 1), zero_volume(once, 1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_expert_is_used_where_the_rules_put_it(stage):
    """Fails if the place of use is guessed from the axes over which ZeRO splits."""
    plan = make_run(stage, make=runs.make_small_plan)
    split = P("expert", None, "data")
    for rows in (plan.master, plan.compute, plan.grad_sum, plan.grads):
        assert rows["kernel"].used.spec == P("expert", None, None)
        assert rows["bias"].used.spec == P(None)
    assert plan.master["kernel"].spec == (split if stage else P("expert", None, None))
    assert plan.compute["kernel"].spec == plan.master["kernel"].spec or stage < 3


def test_parts_of_another_size_are_refused():
    config = runs.make_config(1, mesh=MESH)
    with pytest.raises(PlanError) as error:
        make_plan(config, meshes.make_mesh(MESH), make_model(3), optax.sgd(RATE))
    assert str(error.value) == (
        "kernel=(3, 6, 7) has a dim of 3 for 2 devices with parts of their own; use a "
        "multiple of 2, or another mesh.expert"
    )


MOE = schema.TokenChoice(num_experts=8, drop="position", min_capacity=1)
MODEL = dataclasses.replace(
    tensor.GPT, num_layers=1, embed_size=16, mlp_size=32, vocab_size=64, moe=MOE
)
DROPLESS = dataclasses.replace(MODEL, moe=schema.TokenChoice(num_experts=8))


def exchanges(model, remat, mesh, stage):
    """Collectives over `expert` of as many values as tokens of a device have."""
    config = tensor.make_config(dataclasses.replace(model, remat=remat), mesh, stage)
    step, compiled, _ = tensor.compile_step(config, 8)
    tokens = tensor.ROWS * tensor.LENGTH // 8
    return sum(
        each.times
        for each in list_collectives(compiled.as_text())
        if mesh_axes(each.groups, step.mesh) == ("expert",)
        and each.op in ("all-to-all", "all-gather", "reduce-scatter")
        and each.elements >= tokens * model.embed_size
    )


@pytest.mark.parametrize(
    ("model", "remat", "expected"),
    [
        (MODEL, "full", 5),
        (MODEL, "attention", 4),
        (DROPLESS, "elementwise", 4),
    ],
    ids=["rows-full", "rows-attention", "tokens-elementwise"],
)
def test_recomputation_repeats_no_exchange(model, remat, expected):
    """Only `full` sends tokens again, and not outputs, which no gradient reads."""
    assert exchanges(model, remat, schema.Mesh(data=2, expert=4), 0) == expected


def test_gathering_parameters_again_gathers_no_tokens():
    """Fails if the policy of ZeRO 3 takes tokens for parameters."""
    assert exchanges(DROPLESS, "none", schema.Mesh(data=2, expert=4), 3) == 4


def test_tensor_ranks_recompute_without_exchange():
    mesh = schema.Mesh(data=1, expert=4, tensor=2)
    assert exchanges(DROPLESS, "attention", mesh, 0) == 4
