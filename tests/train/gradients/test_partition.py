"""Models split into embedding, layers and head, and those that cannot be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import lines, pipelines, two_segments
from zjax.errors import PlanError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan
from zjax.train.partition import StagePartition


def plan_of(config, model):
    mesh = abstract_mesh(config.mesh, 8)
    return make_plan(config, mesh, model, make_optimizer(config, model))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_split_is_joined_again(tied):
    """Fails if a layer is lost, or the gradient of what embedding and head share."""
    config = pipelines.make_config(mesh={"pipeline": 2}, tied_head=tied)
    model = make_model(config)
    params, _ = model.init(jax.random.key(0))
    partition = StagePartition(model, plan_of(config, model))
    parts = partition.split(params)
    (blocks,) = parts.stages
    assert blocks["mlp"]["up"]["kernel"].shape[0] == config.model.num_layers
    joined = partition.join(parts)
    if tied:
        params["embedding"]["tokens"] *= 2  # as the sum of two gradients
    jax.tree.map(np.testing.assert_array_equal, joined, params)


def test_model_that_is_no_line_is_refused():
    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def init(key):
        return {"w": jnp.zeros((4, 1))}

    def apply(params, x):
        return x @ params["w"]

    batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
    with pytest.raises(PlanError) as error:
        config = {"mesh.pipeline": 2}
        zjax.initialize((init, apply), optax.sgd(0.1), loss_fn, batch, config)
    assert str(error.value) == (
        "mesh.pipeline=2 cannot cut a model that is no line of blocks; use 1, or "
        "a model with a zjax.Stack"
    )


def test_blocks_that_are_not_stacked_are_refused():
    config = pipelines.make_config(mesh={"pipeline": 2})
    model = make_model(config)
    stack = model.stack

    def split(params):
        embed, (blocks,), head = stack.split(params)
        return embed, (blocks | {"norm": params["head"]["norm"]},), head

    other = dataclasses.replace(model, stack=dataclasses.replace(stack, split=split))
    with pytest.raises(PlanError) as error:
        StagePartition(other, plan_of(config, model))
    assert str(error.value) == (
        "mesh.pipeline=2 cannot cut blocks whose arrays do not stack them; use 1, or a "
        "model with a zjax.Stack"
    )


def reversed_layers(split, params):
    embed, (blocks,), head = split(params)
    return embed, (jax.tree.map(lambda x: x[::-1], blocks),), head


def doubled_tables(split, params):
    embed, blocks, head = split(params)
    return jax.tree.map(lambda x: 2 * x, embed), blocks, head


def two_lines(split, params):
    embed, (blocks,), head = split(params)
    return embed, (blocks, blocks), head


def stacked(join, embed, segments, head):
    (blocks,) = segments
    joined = join(embed, segments, head)
    return joined | {"blocks": jax.tree.map(jnp.asarray, blocks)}


def lost_head(join, embed, segments, head):
    return join(embed, segments, head) | {"head": {}}


@pytest.mark.parametrize(
    ("function", "mine", "what"),
    [
        ("split", reversed_layers, "fails with TypeError on leaves that are no arrays"),
        ("split", doubled_tables, "fails with TypeError on leaves that are no arrays"),
        ("split", two_lines, "fails with ValueError on leaves that are no arrays"),
        (
            "join",
            stacked,
            "fails with TypeError on layers that are no arrays",
        ),
        ("join", lost_head, "does not put back what Stack.split selects"),
    ],
)
def test_stack_that_does_more_than_select_is_refused(function, mine, what):
    """Fails if a user sees an exception of ours from the middle of their function."""
    config = pipelines.make_config(mesh={"pipeline": 2}, tied_head=False)
    model = make_model(config)
    given = functools.partial(mine, getattr(model.stack, function))
    other = zjax.with_stack(model, **{function: given})
    with pytest.raises(PlanError) as error:
        make_run(config, other, make_optimizer(config, other))
    remedy = {
        "split": "let it select leaves alone",
        "join": "let it put leaves back",
    }[function]
    assert str(error.value) == (
        f"mesh.pipeline=2 cannot cut a model whose Stack.{function} {what}; {remedy}, "
        "or use 1"
    )


def test_context_that_follows_from_parameters_is_refused():
    """Fails if parameters that only the context reads silently get no gradient."""
    config = pipelines.make_config(mesh={"pipeline": 2}, stage=3)
    model = make_model(config)
    stack = model.stack

    def embed(params, batch, key):
        carry, context = stack.embed(params, batch, key)
        lengths = params["embedding"]["positions"].sum().astype(int)
        return carry, context._replace(lengths=lengths)

    other = zjax.with_stack(model, embed=embed)
    run = make_run(config, other, make_optimizer(config, other))
    with pytest.raises(PlanError) as error:
        run.step(run.state, pipelines.make_batch(0))
    assert str(error.value) == (
        "mesh.pipeline=2 gives no gradient to parameters that the context follows "
        "from; use 1, or have Stack.embed put what does into the carry"
    )


def test_weight_that_follows_from_more_than_the_batch_is_refused():
    """Fails if weights are taken from a stream that is not there yet."""

    def head(params, x, batch):
        total, _, sums = lines.head(params, x, batch)
        return total, jnp.float32((x > 0).sum()), sums

    model = lines.make_model(lines.block, 2, head=head)
    with pytest.raises(PlanError) as error:
        lines.train(model, lines.make_batch(), mesh={"pipeline": 2, "data": 4})
    assert str(error.value) == (
        "mesh.pipeline=2 needs weights that follow from the batch alone; use 1, or "
        "have Stack.head compute its weight from nothing else"
    )


def test_stages_that_would_hold_all_blocks_are_refused(monkeypatch):
    """Fails if a pipeline runs whose every stage takes as long as one device."""
    model = two_segments.resized(monkeypatch, 1, 1)
    with pytest.raises(PlanError) as error:
        settings = {"mesh.pipeline": 2}
        zjax.initialize(model, None, None, two_segments.make_batch(), settings)
    assert str(error.value) == (
        "mesh.pipeline=2 gives each stage room for all 2 blocks, as each has some for "
        "blocks of each of 2 segments; use 1, or fewer segments"
    )


def test_model_state_is_refused():
    """Fails if statistics silently stay as they start."""
    config = pipelines.make_config(mesh={"pipeline": 2})
    model = make_model(config)
    statistics = {"norm": {"mean": jnp.zeros(2), "count": jnp.int32(0)}}

    def init(key):
        return model.init(key)[0], statistics

    other = dataclasses.replace(model, init=init)
    with pytest.raises(PlanError) as error:
        make_run(config, other, make_optimizer(config, other))
    assert str(error.value) == (
        "mesh.pipeline=2 never updates the model state norm/count, norm/mean, which no "
        "Stack takes; use 1, or a model without model state"
    )


@pytest.mark.parametrize(
    ("pipeline", "num_layers", "message"),
    [
        (
            {"kind": "interleaved"},
            6,
            "pipeline.num_chunks=2 does not cut 6 blocks into equal parts on 4 stages; "
            "use a number that does, or pipeline='1f1b'",
        ),
        (
            {},
            3,
            "mesh.pipeline=4 makes more stages than the 3 blocks of the model; use at "
            "most 3",
        ),
        (
            {"kind": "zb_h1"},
            4,
            "pipeline='zb_h1' cannot take gradients of weights from blocks "
            "that are recomputed; use '1f1b', or a model whose `keeps` is None",
        ),
    ],
    ids=["chunks", "stages", "weights-apart"],
)
def test_model_of_yours_that_does_not_fit_is_refused(pipeline, num_layers, message):
    remat = "full" if pipeline.get("kind") == "zb_h1" else "none"
    config = pipelines.make_config(
        mesh={"pipeline": 4}, pipeline=pipeline, num_layers=num_layers, remat=remat
    )
    model = make_model(config)
    with pytest.raises(PlanError) as error:
        zjax.initialize(model, None, None, pipelines.make_batch(0), config)
    assert str(error.value) == message
