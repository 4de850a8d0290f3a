"""Smaller moments under every stage: their bytes, their place, what they cost."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import features, models, rules, runs, small_run
from tests.support.trees import unpadded
from zjax.optim.build import make_optimizer
from zjax.sharding import describe, memory
from zjax.typing import Loss, Model

N = 8
each_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])


def make_run(
    dtype,
    stage,
    *,
    name="adamw",
    model=None,
    make=runs.make_small_run,
    **settings,
):
    model = models.make_mlp() if model is None else model
    optimizer = rules.optimizer(
        name, moment_dtype=dtype, num_warmup_steps=0, peak_learning_rate=0.01
    )
    tx = make_optimizer(runs.make_config(stage, optimizer=optimizer), model)
    return make(tx, stage, model=model, optimizer=optimizer, **settings)


@each_stage
def test_every_dtype_takes_the_bytes_it_promises(stage):
    """Fails if moments stay wide, or rest whole, or their scales do."""
    shares, bias = (N, 8) if stage else (1, 7)
    matrices, sides = 2 * models.WIDTH * models.HIDDEN, models.WIDTH + models.HIDDEN
    # Both matrices are split by rows: scales of rows with them, those of columns not.
    scales = sides // shares + sides
    moments = {
        "float32": 8 * (matrices + bias) // shares,
        "bfloat16": 4 * (matrices + bias) // shares,
        "int8": 2 * (matrices + 4 * bias) // shares + 2 * 4 * scales,
    }
    for dtype, expected in moments.items():
        run = make_run(dtype, stage)
        counters = 2 if dtype == "float32" else 3
        assert runs.held_bytes(run.state.opt_state) == expected + 4 * counters
        assert memory.tree_bytes(run.plan.opt_state) == expected + 4 * counters


def test_plan_shows_the_smaller_moments():
    plans = [make_run(d, 2, make=runs.make_small_plan) for d in ("bfloat16", "int8")]
    lines = {
        " ".join(line.split())
        for plan in plans
        for line in describe.describe_plan(plan).splitlines()
    }
    assert {
        "state/*/mu/up 16x64 bfloat16 data,- device 256 B",
        "state/*/mu/up/codes 16x64 int8 data,- device 128 B",
        "state/*/nu/up/codes 16x64 uint8 data,- device 128 B",
        "state/*/nu/up/scales/* 16x1 float32 data,- device 8 B",
        "state/*/nu/up/scales/* 1x64 float32 whole device 256 B",
    } <= lines


SHAPES = {"columns": (7, 64), "padded": (9, 7), "stacked": (2, 8, 24), "thin": (48, 3)}


def awkward_model():
    """Split by columns, padded, stacked, and by rows of a few numbers."""

    def init(key):
        return {name: jnp.ones(shape) for name, shape in SHAPES.items()}, {}

    def loss(params, model_state, batch, key):
        target = jnp.mean(batch["x"])
        value = sum(jnp.mean((x - target) ** 2) for x in params.values())
        return Loss(value, jnp.float32(1), model_state, {})

    return Model(
        init=init,
        loss=loss,
        bind=lambda params, model_state: None,
        logical=lambda params: {
            name: ("layers", None, None) if name == "stacked" else (None, None)
            for name in params
        },
    )


def communicated(dtype, stage):
    """Elements of each array that a step sends between devices."""
    model, make = awkward_model(), runs.make_small_step
    step = make_run(dtype, stage, model=model, make=make)
    text = step.compile(models.make_batch()).as_text()
    sent = re.findall(r"= (.*?) (?:all-|reduce-scatter|collective-permute)", text)
    return sorted(
        math.prod(int(n) for n in dims.split(",") if n)
        for shape in sent
        for dims in re.findall(r"\w\d+\[([\d,]*)\]", shape)
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_smaller_moments_send_nothing_but_scales(stage):
    """Fails if a block is cut apart by the sharding, so that moments are gathered."""
    wide = communicated("float32", stage)
    assert communicated("bfloat16", stage) == wide
    extra = collections.Counter(communicated("int8", stage))
    extra.subtract(wide)
    assert min(extra.values()) >= 0
    # Of the two scales of each of two moments, at most one is cut by the sharding.
    split = {"columns": 7, "padded": 9, "stacked": 2 * 24, "thin": 3}
    sent = sum(size * count for size, count in extra.items())
    assert sent == (2 * sum(split.values()) if stage else 0)


PARITY = [
    *(("adamw", dtype, (0, 1, 2, 3)) for dtype in ("bfloat16", "int8")),
    *((name, "int8", (3,)) for name in ("lion", "muon", "sgd")),
]


@pytest.mark.parametrize(("name", "dtype", "stages"), PARITY)
def test_every_stage_takes_the_steps_of_one_device(name, dtype, stages):
    """Fails if what is rounded depends on where it lies."""
    alone, state = runs.train(make_run(dtype, 0, name=name, num_devices=1), 3)
    for stage in stages:
        losses, other = runs.train(make_run(dtype, stage, name=name), 3)
        np.testing.assert_allclose(losses, alone, rtol=1e-4)
        np.testing.assert_allclose(other.master["up"], state.master["up"], atol=2e-4)


@each_dtype
def test_step_that_is_not_finite_leaves_the_moments(dtype):
    run = make_run(dtype, 2)
    _, state = runs.train(run, 2)
    before = jax.tree.map(np.asarray, state.opt_state)
    batch = models.make_batch()
    batch["x"][3, 5] = np.inf
    after, metrics = run.step(state, batch)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before)


def test_run_resumes_bit_for_bit_and_on_another_mesh(tmp_path):
    settings = "optimizer.rule=adamw optimizer.rule.moment_dtype=int8 zero.stage="
    run, other = (
        features.start(features.config_of(settings + stage), number, is_drawn=True)
        for stage, number in (("2 model.layers_per_scan=1", 8), ("3", 2))
    )
    state, _ = features.train(run)
    assert jnp.dtype("int8") in {x.dtype for x in jax.tree.leaves(state.opt_state)}
    zjax.save(tmp_path, state, run)
    before, batch = moments(run, state), features.make_batch(run.config, 3)
    whole, _ = run.step(state, batch)
    elsewhere, _ = zjax.restore(tmp_path, other)
    jax.tree.map(np.testing.assert_array_equal, moments(other, elsewhere), before)
    back, _ = zjax.restore(tmp_path, run)
    jax.tree.map(np.testing.assert_array_equal, run.step(back, batch)[0], whole)


def moments(run, state):
    """The state of the optimizer without the padding of its mesh."""
    return unpadded(state.opt_state, run.plan.opt_state)


TEXT = (
    "num_steps=200",
    "global_batch_size=16",
    "model.num_layers=2",
    "model.embed_size=64",
    "model.mlp_size=256",
    "model.vocab_size=257",
    "model.max_length=64",
    "model.dropout_rate=0",
    "data.source=standard_library",
    "data.length=64",
    "evaluation.num_batches=8",
    "optimizer.schedule.num_warmup_steps=20",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer.peak_learning_rate=2e-3",),
        ("optimizer.peak_learning_rate=2e-3", "optimizer.rule.b2=0.999"),
        ("optimizer.rule=muon", "optimizer.peak_learning_rate=4e-3"),
        ("optimizer.rule=sgd", "optimizer.peak_learning_rate=0.3"),
    ],
    ids=["adamw", "adamw-0.999", "muon", "sgd"],
)
def test_loss_on_text_is_that_of_float32(tmp_path, settings):
    losses = {}
    for dtype in ("float32", "bfloat16", "int8"):
        trainer = small_run.fit(
            tmp_path / dtype,
            *TEXT,
            *settings,
            f"optimizer.rule.moment_dtype={dtype}",
            num_devices=1,
        )
        losses[dtype] = trainer.evaluate()["eval_loss"]
    assert losses["float32"] < 3.0
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.01)
    np.testing.assert_allclose(losses["int8"], losses["float32"], rtol=0.01)
