"""Random token dropping in a run: what it trains on, counts, compiles and resumes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import small_run
from tests.support.cases import some_by_hand
from tests.support.refusals import config_error, data_error, plan_error
from zjax.config import load_config
from zjax.models.build import make_model
from zjax.ops.tokens import take_tokens
from zjax.run.batch import SCHEDULE, check_model
from zjax.run.compiler import CompileAhead
from zjax.schedule.training import TrainingSchedule
from zjax.sharding import plan
from zjax.stack.forward import loss_of_step, run_stack
from zjax.typing import ATTENTION_WINDOW, NOTHING_DROPPED, Dropping, Tiles

RANDOM_LTD = (
    "model.num_layers=3",
    "num_steps=6",
    "random_ltd=layerwise",
    "random_ltd.pacing.start=8",
    "random_ltd.pacing.multiple=8",
    "random_ltd.pacing.num_steps=4",
)
KEPT = [8, 8, 8, 8, 16, 16]
"""8 + 8 t / 4 in step t, from 0, rounded down to multiples of 8."""


def test_metrics_count_tokens_and_more_tokens_are_compiled_ahead(tmp_path, capsys):
    """Fails if a step compiles, or does not find what was compiled; layers that are
    dropped besides need no program of their own."""
    drops = "layer_drop.theta=0.5", "layer_drop.gamma=0.3"
    small_run.fit(tmp_path, *RANDOM_LTD, *drops, num_devices=1)
    found = small_run.records(tmp_path)
    assert [line["kept_tokens"] for line in found] == KEPT
    in_layers = 16 * np.cumsum([2 * 16 + kept for kept in KEPT])
    assert [line["consumed_layer_tokens"] for line in found] == in_layers.tolist()
    assert [line["consumed_tokens"] for line in found] == [256 * i for i in range(1, 7)]
    thetas = [line["layer_drop_theta"] for line in found]
    np.testing.assert_allclose(thetas, 0.5 + 0.5 * np.exp(-0.3 * np.arange(6)))
    assert "compiles again" not in capsys.readouterr().out


def test_steps_after_the_run_are_not_compiled(tmp_path):
    """The pacing ends with the run, so that whole sequences would come after it."""
    pacing = {"random_ltd.pacing.multiple": 4, "random_ltd.pacing.num_steps": 6}
    config = small_run.make_config(tmp_path, *RANDOM_LTD, pacing)
    compiled, batch = [], {"tokens": np.zeros((16, 16), np.int32)}
    schedule = TrainingSchedule(config)
    with CompileAhead(schedule, lambda *x: compiled.append(x[2]), 1) as ahead:
        for number in range(1, config.num_steps + 1):
            ahead.after(number, batch)
            if ahead.started(number):
                ahead.wait(number)
    assert compiled == [4]


CONTINUED = {
    "one device": (1, "random_ltd=layerwise"),
    "stages that skip layers": (
        2,
        "num_steps=2",
        "model.num_layers=5",
        "mesh.pipeline=2",
        "num_microbatches=2",
        "zero.stage=1",
        "random_ltd=span",
        "layer_drop.theta=0.5",
    ),
    "layers of the host": (
        1,
        "zero.offload=pinned_host",
        "random_ltd=span",
        "layer_drop.theta=0.5",
    ),
}


BY_HAND = {"stages that skip layers", "one device"}
"""The second is held by rows that are cut by length, in the tests of buckets."""


@pytest.mark.parametrize("name", some_by_hand(CONTINUED, BY_HAND))
def test_a_run_that_continues_is_the_run_without_a_stop(tmp_path, name, monkeypatch):
    """Bit for bit; fails if subsets depend on anything but the step."""
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 1)
    num_devices, *more = CONTINUED[name]
    settings = (
        "model.num_layers=3",
        "random_ltd.pacing.start=8",
        "random_ltd.pacing.multiple=8",
        "num_steps=3",
        *more,
    )
    whole = small_run.fit(tmp_path / "a", *settings, num_devices=num_devices)
    small_run.stop(tmp_path / "b", *settings, steps=1, num_devices=num_devices)
    continued = small_run.fit(tmp_path / "b", *settings, num_devices=num_devices)
    small_run.assert_equal(whole, continued)


def make_parts(*overrides):
    """Model, weights and a batch."""
    config = small_run.make_config(
        "runs/none", "model.num_layers=4", "model.dropout_rate=0", *overrides
    )
    model = make_model(config)
    params, _ = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 61)
    return model, params, {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}


def loss_and_gradients(model, params, batch, key, dropping=NOTHING_DROPPED):
    def loss(params):
        return loss_of_step(model, dropping)(params, {}, batch, key).value

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("key", [jax.random.key(0), None], ids=["train", "evaluate"])
def test_whole_sequences_and_evaluation_are_those_of_the_plain_model(key):
    """Bit for bit."""
    model, params, batch = make_parts()
    plain = loss_and_gradients(model, params, batch, key)
    num_kept = 8 if key is None else 16
    found = loss_and_gradients(model, params, batch, key, Dropping(num_kept=num_kept))
    jax.tree.map(np.testing.assert_array_equal, found, plain)


def test_flops_fall_with_the_tokens():
    """Fails if dropped tokens are computed and thrown away."""
    model, params, batch = make_parts("model.embed_size=64", "model.mlp_size=256")

    def count(num_kept):
        loss_of = loss_of_step(model, Dropping(num_kept=num_kept))
        run = jax.grad(lambda p: loss_of(p, {}, batch, jax.random.key(0)).value)
        costs = jax.jit(run).lower(params).cost_analysis()
        assert costs is not None
        return costs["flops"]

    whole, half, quarter = map(count, (16, 8, 4))
    assert (whole - quarter) / (whole - half) == pytest.approx(1.5, rel=0.05)


CONTEXTS = {
    "causal, rotary, documents": (["model.positions=rotary"], "segment_ids"),
    "encoder, documents": (["model.kind=encoder"], "segment_ids"),
    "encoder, lengths": (["model.kind=encoder"], "lengths"),
    "causal, sparse, documents": (
        ["model.attention=sparse", "model.attention.pattern=dense"],
        "segment_ids",
    ),
}


def first_block_of(model, params, batch):
    """The stack, what enters its blocks, and one of them as it runs."""
    stack = model.stack
    assert stack is not None and stack.take_tokens is not None
    embed, (blocks,), _ = stack.split(params)
    block, run = jax.tree.map(lambda x: x[1], blocks), jax.jit(stack.segments[0].block)
    return stack, *stack.embed(embed, batch, None), lambda *x: run(block, *x, None)


@pytest.mark.parametrize("name", CONTEXTS)
def test_block_sees_the_kept_tokens_where_they_were(name):
    """As a whole block in which they see each other alone: the same positions, order,
    documents and padding."""
    settings, mask = CONTEXTS[name]
    model, params, batch = make_parts(*settings)
    ids = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([9, 4, 3]), axis=1)
    batch["segment_ids"] = jnp.broadcast_to(ids, (3, 16))
    if mask == "lengths":
        batch["segment_ids"] = (jnp.arange(16) < 11).astype(int)[None].repeat(3, 0)
        batch["lengths"] = jnp.full(3, 11)
    indices = jnp.array([[0, 3, 8, 9, 15], [0, 1, 2, 3, 4], [4, 7, 9, 10, 11]])
    stack, x, context, run = first_block_of(model, params, batch)
    if mask == "lengths":
        context = context._replace(segment_ids=None)
    part = take_tokens(x, indices)
    found, _ = run(part, stack.take_tokens(context, indices))
    kept = (jnp.arange(16)[None, :, None] == indices[:, None]).any(-1)
    alone = jnp.where(kept, batch["segment_ids"], -1)
    whole, _ = run(x, context._replace(segment_ids=alone, lengths=None))
    wanted, seen = (
        take_tokens(whole, indices),
        take_tokens(batch["segment_ids"], indices),
    )
    np.testing.assert_allclose(found[seen > 0], wanted[seen > 0], rtol=1e-5, atol=1e-6)


def test_a_window_counts_kept_tokens():
    """Fails if it is lost where tokens are dropped: a token that sees itself alone does
    not see which others are left."""
    model, params, batch = make_parts("model.positions=rotary")
    batch[SCHEDULE] = {ATTENTION_WINDOW: jnp.float32(1)}
    indices = jnp.array([[0, 3, 8, 9, 15], [0, 1, 2, 3, 4], [4, 7, 9, 10, 11]])
    stack, x, context, run = first_block_of(model, params, batch)
    part, narrow = take_tokens(x, indices), stack.take_tokens(context, indices)
    found, _ = run(part, narrow)
    whole, _ = run(x, context)
    np.testing.assert_allclose(found, take_tokens(whole, indices), rtol=1e-5, atol=1e-6)
    free, _ = run(part, narrow._replace(window=None))
    assert np.abs(free - found).max() > 1e-3


NUM_LAYERS = 4


def make_own(take, num_layers=NUM_LAYERS):
    """A model of the user's, whose blocks count the tokens that they see."""

    def block(params, x, context, key):
        return x + params["w"] * context, zjax.Auxiliary()

    def head(params, x, batch):
        return jnp.sum(x), jnp.float32(len(x)), {}

    stack = zjax.Stack(
        lambda params, batch, key: (batch["x"], batch["scale"]),
        (zjax.Segment(block, num_layers),),
        head,
        lambda params: ({}, (params["blocks"],), {}),
        lambda embed, segments, head: {"blocks": segments[0]},
        take_tokens=take,
    )
    return zjax.Model(
        init=lambda key: ({"blocks": {"w": jnp.ones(num_layers)}}, {}),
        loss=zjax.loss_of(stack),
        bind=lambda params, model_state: params,
        logical=lambda params: {"blocks": {"w": ("layers",)}},
        stack=stack,
    )


BATCH = {"x": np.zeros((8, 16), np.float32), "scale": np.ones((8, 16), np.float32)}
SETTINGS = {
    "num_steps": 8,
    "precision": {"compute_dtype": "float32"},
    "data": {"length": 16},
    "random_ltd": {
        "kind": "layerwise",
        "pacing": {"start": 8, "multiple": 4, "num_steps": 4},
    },
}


@pytest.mark.parametrize("form", ["layerwise", "span"])
def test_blocks_of_yours_see_the_tokens_that_are_kept(form):
    """Two blocks see 16 tokens of each row, two of them fewer; each gradient counts its
    own, and steps with more tokens are other programs."""
    settings = SETTINGS | {"random_ltd": SETTINGS["random_ltd"] | {"kind": form}}
    run = zjax.initialize(make_own(take_tokens), optax.sgd(0.0), None, BATCH, settings)
    kept, state, found = [8, 8, 12, 12, 16, 16], run.state, []
    for _ in kept:
        state, metrics = run.step(state, BATCH)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]) ** 2))
    wanted = [(2 * 16 + 2 * n, 2 * 16**2 + 2 * n**2) for n in kept]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert run.evaluate(state, BATCH)["loss"] == 4 * 16


def test_a_line_search_drops_the_tokens_of_the_step():
    """Fails if `value_fn` computes the loss of another step than the gradients."""

    def update(grads, state, params, *, value, value_fn, **others):
        return grads, jnp.stack([value, value_fn(params)])

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(2), update)
    run = zjax.initialize(make_own(take_tokens), tx, None, BATCH, SETTINGS)
    state, _ = run.step(run.state, BATCH)
    [values] = jax.tree.leaves(state.opt_state)
    assert values.tolist() == [2 * 16 + 2 * 8] * 2


@pytest.mark.parametrize(
    ("form", "counts"), [("layerwise", {2, 3, 4}), ("span", {2, 4})]
)
def test_each_layer_draws_its_own_tokens(form, counts):
    """Fails if all layers drop the same ones, or those of a span do not."""
    stack, params = make_own(take_tokens).stack, {"blocks": {"w": jnp.ones(NUM_LAYERS)}}
    dropping = Dropping(num_kept=8, once=form == "span")
    inputs = params, jax.tree.map(jnp.asarray, BATCH), jax.random.key(0)
    layers, _ = run_stack(stack, *inputs, dropping=dropping)
    assert {*np.asarray(layers).ravel().tolist()} == counts
    np.testing.assert_array_equal(layers.sum(axis=1), np.full(8, 2 * 16 + 2 * 8))


def test_batches_of_other_lengths_are_refused():
    """Fails if layers jump from few tokens to all."""
    longer = {name: x.repeat(2, axis=1) for name, x in BATCH.items()}
    own = make_own(take_tokens)
    run = zjax.initialize(own, optax.sgd(0.0), None, longer, SETTINGS)
    with data_error(
        "data.length=16 is not that of the batch, whose rows have [32] tokens; set it, "
        "as random_ltd counts on it"
    ):
        run.step(run.state, longer)


def test_batches_without_names_drop_tokens():
    """Fails if a batch must be a dict, to which something could be added."""
    model = make_own(take_tokens)
    stack = dataclasses.replace(model.stack, embed=lambda params, batch, key: batch)
    unnamed = dataclasses.replace(model, stack=stack, loss=zjax.loss_of(stack))
    batch = BATCH["x"], BATCH["scale"]
    run = zjax.initialize(unnamed, optax.sgd(0.0), None, batch, SETTINGS)
    _, metrics = run.step(run.state, batch)
    assert metrics["loss"] == 2 * 16 + 2 * 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            make_own(None),
            "random_ltd='layerwise' needs what blocks read of a subset of the "
            "tokens; set take_tokens of the zjax.Stack",
        ),
        (
            make_own(take_tokens, 2),
            "random_ltd='layerwise' has no block between the first and the last "
            "of 2; use None, or more blocks",
        ),
        (
            zjax.adapt(
                (lambda key: jnp.ones(()), lambda params, x: params * x),
                lambda model, batch, key: jnp.mean(model(batch["x"])),
                BATCH,
            ),
            "random_ltd='layerwise' needs a model that is a stack of blocks; set "
            "stack, and loss=zjax.loss_of(stack), of a zjax.Model",
        ),
    ],
    ids=["tokens", "layers", "stack"],
)
def test_models_that_cannot_drop_tokens_are_refused(model, message):
    with config_error(message):
        zjax.initialize(model, optax.sgd(0.1), None, BATCH, SETTINGS)


def test_tiles_of_yours_are_refused_where_blocks_run_one_by_one():
    """Fails if a trunk runs on some tokens, and its tiles on all."""
    own = make_own(take_tokens)
    assert own.stack is not None
    segment = own.stack.segments[0]
    tiles = Tiles(segment.block, segment.block, segment.block)
    segments = (dataclasses.replace(segment, tiles=tiles),)
    stack = dataclasses.replace(own.stack, segments=segments)
    model = dataclasses.replace(own, stack=stack, loss=zjax.loss_of(stack))
    config = load_config(SETTINGS, "zero.offload=pinned_host")
    with config_error(
        "random_ltd='layerwise' is not built for tiles with "
        "zero.offload='pinned_host'; leave Segment.tiles out, or store the "
        "state on the devices"
    ):
        check_model(model, config)


def test_stages_of_yours_without_tokens_to_drop_are_refused():
    settings = SETTINGS | {"mesh": {"pipeline": 2}, "num_microbatches": 2}
    own = make_own(take_tokens)
    with plan_error(
        "mesh.pipeline=2 leaves random_ltd no block to drop tokens of: stages run one "
        "program, and all blocks run whole beside the first or the last one; use fewer "
        "stages or chunks, or random_ltd=None"
    ):
        zjax.initialize(own, optax.sgd(0.1), None, BATCH, settings)
