"""Pipelines of any schedule, mesh and stage compute what one device computes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import pipelines
from tests.support.cases import some_by_hand
from tests.support.trees import assert_close
from zjax.parallel import slots
from zjax.settings import schema

KEPT = {"recompute": False}
LLAMA = {
    "norm": "rms_norm",
    "positions": schema.Rotary(),
    "activation": "swiglu",
    "use_bias": False,
    "tied_head": False,
    "num_kv_heads": 2,
}
CASES = {
    "1f1b": {"mesh": {"pipeline": 4, "data": 2}},
    "gpipe, kept, stage 3": {
        "mesh": {"pipeline": 2, "data": 4},
        "stage": 3,
        "pipeline": {"kind": "gpipe", **KEPT},
    },
    "interleaved": {
        "mesh": {"pipeline": 2, "data": 4},
        "stage": 1,
        "pipeline": "interleaved",
    },
    "interleaved, kept, stage 2": {
        "mesh": {"pipeline": 2, "data": 4},
        "stage": 2,
        "pipeline": {"kind": "interleaved", **KEPT},
    },
    "interleaved, stage 2, llama": {
        "mesh": {"pipeline": 2, "data": 2, "tensor": 2},
        "stage": 2,
        "pipeline": "interleaved",
        **LLAMA,
    },
    "weights apart, tensor": {
        "mesh": {"pipeline": 2, "data": 2, "tensor": 2},
        "stage": 1,
        "pipeline": "zb_h1",
    },
    "layers that do not divide, vocabulary neither": {
        "mesh": {"pipeline": 2, "data": 4},
        "stage": 1,
        "num_layers": 3,
        "vocab_size": 41,
        "remat": "full",
    },
    "heads traded along the sequence": {
        "mesh": {"pipeline": 2, "sequence": 2, "tensor": 2},
        "stage": 1,
        "sequence_attention": "ulysses",
    },
    "weights apart, heads traded along the sequence": {
        "mesh": {"pipeline": 2, "sequence": 2, "tensor": 2},
        "stage": 1,
        "pipeline": "zb_h1",
        "sequence_attention": "ulysses",
    },
    "ring": {
        "mesh": {"pipeline": 2, "data": 2, "sequence": 2},
        "stage": 3,
        "pipeline": {"kind": "interleaved", **KEPT},
        "sequence_attention": "ring",
        **LLAMA,
    },
    "nothing to split parameters over": {
        "mesh": {"pipeline": 4, "tensor": 2},
        "stage": 3,
    },
    "the same, vocabulary that does not divide": {
        "mesh": {"pipeline": 2, "tensor": 4},
        "stage": 2,
        "vocab_size": 41,
    },
    "nothing to split parameters over, fewer microbatches than stages": {
        "mesh": {"pipeline": 4, "tensor": 2},
        "num_microbatches": 2,
        "stage": 3,
    },
    "fewer microbatches than stages": {
        "mesh": {"pipeline": 4, "replica": 2},
        "num_microbatches": 2,
        "stage": 3,
    },
}
BY_HAND = {
    "1f1b",
    "gpipe, kept, stage 3",
    "interleaved",
    "interleaved, kept, stage 2",
    "interleaved, stage 2, llama",
    "weights apart, tensor",
    "heads traded along the sequence",
    "weights apart, heads traded along the sequence",
    "nothing to split parameters over",
    "fewer microbatches than stages",
    "the same, vocabulary that does not divide",
}
"""What other cases hold among more."""
GRID = list(
    itertools.product(
        [
            {"pipeline": 2, "data": 4},
            {"pipeline": 4, "data": 2},
            {"pipeline": 2, "tensor": 4},
            {"pipeline": 2, "data": 2, "tensor": 2},
            {"pipeline": 4, "tensor": 2},
            {"pipeline": 2, "data": 2, "sequence": 2},
        ],
        [0, 1, 2, 3],
        [1, 4],
        ["1f1b", "gpipe", "zb_h1"],
    )
)


@pytest.fixture(autouse=True)
def spoil(monkeypatch):
    """Whatever a pass reads before it was written spoils the results."""

    real = slots.full

    def full(shape, dtype, value=0):
        return real(shape, dtype, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1)

    monkeypatch.setattr(slots, "full", full)


def assert_same(case, num_steps=3, rtol=1e-4, atol=2e-5):
    of_devices = ("mesh", "stage", "pipeline", "sequence_attention")
    shape = {k: v for k, v in case.items() if k not in of_devices}
    run = pipelines.start(pipelines.make_config(**case))
    losses, weights = pipelines.train(run, num_steps)
    wanted_losses, wanted = pipelines.on_one_device(num_steps=num_steps, **shape)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(weights, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", some_by_hand(CASES, BY_HAND))
def test_steps_equal_one_device(name):
    """Fails if a stage has another's input, a microbatch is lost, gradients of what
    embedding and head share are not added, or padding counts."""
    assert_same(CASES[name])


@pytest.mark.slow
def test_a_first_microbatch_without_weight_counts_for_nothing(monkeypatch):
    """Fails if all others are counted by the weight of the first, which is 0."""
    real = pipelines.make_batch

    def make_batch(step):
        batch = real(step)
        batch["weights"][::4] = 0  # row i is in microbatch i mod 4
        return batch

    monkeypatch.setattr(pipelines, "make_batch", make_batch)
    split = pipelines.make_config(mesh={"pipeline": 2, "data": 2})
    one = pipelines.start(pipelines.make_config(), jax.devices()[:1])
    wanted_losses, wanted = pipelines.train(one)
    losses, weights = pipelines.train(pipelines.start(split, jax.devices()[:4]))
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(close, weights, wanted)


@pytest.mark.slow
def test_norms_and_averages_are_those_of_all_stages():
    """Fails if a stage clips by its own norm, or some gradients are of another scale,
    which SGD shows and Adam would divide away."""
    case = {"optimizer": "sgd", "clip_norm": 0.05, "ema_decay": 0.9, "num_layers": 5}
    split = pipelines.make_config(mesh={"pipeline": 4, "data": 2}, **case)
    found = steps_of(pipelines.start(split))
    one = pipelines.make_config(**case)
    wanted = steps_of(pipelines.start(one, jax.devices()[:1]))
    assert min(wanted[0]) > 2 * case["clip_norm"]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, found, wanted)


def steps_of(run):
    """Norms of gradients, and averaged weights after three steps."""
    state, norms = run.state, []
    for step in range(3):
        state, metrics = run.step(state, pipelines.make_batch(step))
        norms.append(float(metrics["grad_norm"]))
    return norms, pipelines.whole(state.ema, run.plan.ema)


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [
        pytest.param(
            *({"mesh": {"pipeline": 2, "data": 2, "tensor": 2}, "stage": 2}, 8),
            marks=pytest.mark.slow,
        ),
        (
            {
                "mesh": {"pipeline": 2},
                "num_layers": 2,
                "remat": "full",
                "pipeline": KEPT,
            },
            2,
        ),
        pytest.param(
            *({"mesh": {"pipeline": 2}, "pipeline": "interleaved"}, 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bfloat16_is_close_to_float32(case, num_devices):
    """Fails if a compiler cannot take sums of 16 bits where it has other axes, or
    products of 16 bits that add to wider sums."""
    config = pipelines.make_config(compute_dtype="bfloat16", **case)
    losses, _ = pipelines.train(pipelines.start(config, jax.devices()[:num_devices]))
    wanted, _ = pipelines.on_one_device(num_layers=case.get("num_layers", 4))
    np.testing.assert_allclose(losses, wanted, rtol=1e-2)


@pytest.mark.slow
def test_float16_takes_steps_and_writes_text():
    """Fails if the passes of stages overflow at the first scale, or find no product."""
    weights_apart = {"kind": "zb_h1"}
    mesh = {"pipeline": 2, "tensor": 2}
    config = pipelines.make_config(
        mesh=mesh, stage=2, pipeline=weights_apart, compute_dtype="float16"
    )
    run = pipelines.start(config, jax.devices()[:4])
    state, metrics = run.step(run.state, pipelines.make_batch(0))
    assert metrics["skipped_steps"] == 0
    wanted = pipelines.on_one_device()[0][0]
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-3)
    prompts = np.ones((2, 3), np.int32)
    assert run.generate(state, prompts, max_new_tokens=2).shape == (2, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage", "num_microbatches", "schedule"), GRID)
def test_grid(mesh, stage, num_microbatches, schedule):
    """Ten steps of SGD, as Adam would make rounding errors of small gradients large."""
    pipeline = {"kind": schedule, "recompute": schedule == "1f1b"}
    case = {"mesh": mesh, "stage": stage, "pipeline": pipeline, "optimizer": "sgd"}
    case |= {"num_microbatches": num_microbatches}
    assert_same(case, num_steps=10, rtol=1e-5, atol=1e-6)
