"""Which parameters replicas exchange, by which program, and that frozen ones stay."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import models, runs, small_run, totals
from zjax.ops.codecs import make_codec
from zjax.optim.build import make_optimizer
from zjax.replicas.exchange import exchanges_by_program
from zjax.replicas.fragments import make_fragments
from zjax.replicas.state import Outer
from zjax.schedule.exchange import Exchanges, Phase, Rounds
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import make_plan


def test_layers_of_a_stack_are_dealt_out_to_fragments():
    """Fails if layers are lost or sent twice, or come back in another order."""
    mesh = meshes.make_mesh(schema.Mesh(replica=8))
    place = NamedSharding(mesh, P())
    rows = {
        name: ArrayPlan(name, shape, np.dtype("float32"), place, place, num_layers=n)
        for name, shape, n in (("blocks", (5, 3), 5), ("head", (2,), 0))
    }
    leaves = [jnp.arange(15.0).reshape(5, 3), jnp.array([7.0, 8.0])]
    first, second = make_fragments(rows, 2)
    assert [x.tolist() for x in first.take(leaves)] == [leaves[0][::2].tolist()]
    assert [row.shape for row in second.rows(list(rows.values()))] == [(2, 3), (2,)]
    zeros = [jnp.zeros_like(x) for x in leaves]
    for fragment in (first, second):
        zeros = fragment.put(zeros, fragment.take(leaves))
    jax.tree.map(np.testing.assert_array_equal, zeros, leaves)


def scaled_loss(params, model_state, batch, key):
    out = models.loss(params, model_state, batch, key)
    return out._replace(value=out.value * params["scale"])


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_parameter_without_dims_takes_local_steps(codec):
    mlp = models.make_mlp()
    model = dataclasses.replace(
        mlp,
        init=lambda key: ({**mlp.init(key)[0], "scale": jnp.float32(2)}, {}),
        loss=scaled_loss,
        logical=lambda params: {**mlp.logical(params), "scale": ()},
    )
    rounds = schema.LocalSteps(num_steps=2)
    run = runs.make_small_run(
        optax.sgd(0.1),
        0,
        num_devices=2,
        model=model,
        mesh=schema.Mesh(replica=2),
        communication=schema.Communication(codec=codec, local_steps=rounds),
    )
    _, state = runs.train(run, 2)
    assert float(state.master["scale"]) != 2
    copies = np.asarray(state.extra.replicas.master["scale"])
    np.testing.assert_array_equal(copies, [state.master["scale"]] * 2)


@pytest.fixture(scope="module")
def plan():
    """A plan with a frozen array, and router biases that totals move."""
    group = schema.ParamGroup(pattern="^head", learning_rate_scale=0.0)
    rounds = schema.Communication(local_steps=schema.LocalSteps(num_steps=2))
    config = runs.make_config(
        0,
        mesh=schema.Mesh(replica=2),
        optimizer=schema.Optimizer(groups=(group,)),
        communication=rounds,
    )
    model = totals.make_model()
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:2])
    return make_plan(config, mesh, model, make_optimizer(config, model))


@pytest.mark.parametrize(
    ("exchanges", "codecs"),
    [
        (Exchanges(), {}),
        (Exchanges(phases=(Phase("a", "gradients", "int8"),)), {"a": "int8"}),
        (
            Rounds(
                phases=(Phase("synchronous", "gradients", "float32"),),
                outer_codec="int4",
                num_local_steps=4,
                num_fragments=2,
            ),
            {"synchronous": "float32", "mean_0": "int4", "mean_1": "int4"},
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_exchange_holds_what_follows_gradients_alone(exchanges, codecs, plan):
    """Fails if a program sends a frozen array, or a bias that totals move."""
    found = exchanges_by_program(plan, exchanges)
    wanted = {name: make_codec(codec) for name, codec in codecs.items()}
    assert {name: each.codec for name, each in found.items()} == wanted
    rows = jax.tree.leaves(plan.master)
    assert {row.follows for row in rows} == {"gradient", "totals", "nothing"}
    learned = [row.path for row in rows if row.follows == "gradient"]
    of_fragments = set()
    for name, each in found.items():
        paths = [row.path for row in each.rows]
        if name.startswith("mean_"):
            of_fragments.update(paths)
        else:
            assert paths == learned
    assert not exchanges.steps_apart or of_fragments == {*learned}


LORA, NOT_LORA = "lora.rank=2", "^(?!.*/lora/)"
FROZEN = "^embedding|^blocks/mlp"
GROUPS = {"optimizer": {"groups": ({"pattern": FROZEN, "learning_rate_scale": 0},)}}
ROUNDS = (
    "communication.local_steps.num_steps=3",
    "communication.local_steps.num_synchronous_steps=2",
)


@pytest.mark.parametrize("codec", ["onebit", "int8"])
@pytest.mark.parametrize(
    ("settings", "frozen"),
    [((LORA,), NOT_LORA), ((GROUPS, *ROUNDS), FROZEN)],
    ids=["every step", "rounds after synchronous steps"],
)
def test_frozen_weights_stay_and_others_learn(settings, frozen, codec, tmp_path):
    """Fails if a message, an outer step or a merge moves a frozen weight.

    After the last step, which ends with an exchange, replicas have one set of weights.
    """
    settings = "mesh.replica=2", f"communication.codec={codec}", *settings
    trainer = small_run.make_trainer(tmp_path, *settings, num_devices=2)
    run, state = trainer.run, trainer.run.state
    paths = [row.path for row in jax.tree.leaves(run.plan.master)]
    before = [np.asarray(x) for x in jax.tree.leaves(state.master)]
    batch = next(iter(trainer.loader))
    for _ in range(run.config.num_steps):
        state, _ = run.step(state, batch)
    after = [np.asarray(x) for x in jax.tree.leaves(state.master)]
    copies = after
    if isinstance(state.extra, Outer):
        copies = [np.asarray(x) for x in jax.tree.leaves(state.extra.replicas.master)]
    learned = set()
    for path, first, last, copy in zip(paths, before, after, copies, strict=True):
        np.testing.assert_array_equal(copy, np.broadcast_to(last, copy.shape))
        learned |= {path} if (first != last).any() else set()
    assert learned == {path for path in paths if not re.search(frozen, path)}
