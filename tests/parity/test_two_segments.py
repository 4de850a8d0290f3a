"""A stack of two kinds of blocks computes the same on every path."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import two_segments
from tests.support.trees import assert_close
from zjax.errors import ModelError
from zjax.ops.keys import block_key
from zjax.sharding import plan as plans
from zjax.stack.forward import Execution, loss_of

HOST = {"offload": {"kind": "pinned_host", "parameter_memory": "pinned_host"}}
UNEQUAL = np.where(np.arange(two_segments.ROWS) % 4 == 1, 3.0, 0.5)
"""Weights by which four microbatches count for more or less."""
NAMES = ("loss", "grad_norm", "auxiliary_loss", "up", "size", "error")
PATHS = {
    "stage 3": (8, {"zero": {"stage": 3}}),
    "pipeline, stage 3, weights apart": (
        4,
        {
            "mesh": {"pipeline": 2, "data": 2},
            "zero": {"stage": 3},
            "pipeline": "zb_h1",
        },
    ),
    "pipeline, 4 stages": (
        8,
        {
            "mesh": {"pipeline": 4, "data": 2},
            "zero": {"stage": 2},
            "pipeline": {"kind": "gpipe", "recompute": False},
        },
    ),
    "blocks on the host, one keeps its products": (8, {"zero": {"stage": 3} | HOST}),
}


def metrics_of(num_devices, settings, model=None, *, number=2, weights=UNEQUAL):
    """Of three steps in some microbatches, and of an evaluation after them."""
    batch = two_segments.make_batch(weights)
    fixed = {
        "num_microbatches": number,
        "optimizer": {
            "rule": "sgd",
            "schedule": {"num_warmup_steps": 0},
            "clip_norm": 1.0,
        },
        "precision": {"compute_dtype": "float32"},
    }
    zero = {"min_shard_elements": 0} | settings.get("zero", {})
    run = zjax.initialize(
        two_segments.make_model() if model is None else model,
        None,
        None,
        batch,
        fixed | settings | {"zero": zero},
        devices=jax.devices()[:num_devices],
    )
    state, found = run.state, []
    for _ in range(3):
        state, metrics = run.step(state, batch)
        found.append([float(metrics[name]) for name in NAMES])
    if number > 2:
        return found, ()
    evaluation = run.evaluate(state, batch)
    return found, [float(evaluation[name]) for name in NAMES if name != "grad_norm"]


@pytest.fixture(autouse=True)
def _smaller_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)


@functools.cache
def on_one_device(*, is_equal=False):
    weights = None if is_equal else UNEQUAL
    return metrics_of(1, {"zero": {"stage": 0}}, weights=weights)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_computes_what_one_device_does(path):
    """Fails if a path loses a segment, a key, the schedule, or what blocks add."""
    num_devices, settings = PATHS[path]
    model = two_segments.make_model()
    if "keeps" in path:
        keeps = jax.checkpoint_policies.dots_saveable
        model = dataclasses.replace(model, keeps=keeps)
    if path == "stage 3":  # where each device weighs what its own blocks add
        found = metrics_of(num_devices, settings, model, weights=None)
        assert_same(found, on_one_device(is_equal=True))
        return
    assert_same(metrics_of(num_devices, settings, model), on_one_device())


def test_what_blocks_add_counts_by_the_weight_of_the_microbatch():
    equal, _ = on_one_device(is_equal=True)
    auxiliary_loss = NAMES.index("auxiliary_loss")
    (weighted, *_), _ = on_one_device()
    assert abs(equal[0][auxiliary_loss] - weighted[auxiliary_loss]) > 1e-4


@pytest.mark.parametrize(
    ("num_blocks", "mesh", "settings"),
    [
        ((1, 7), {"pipeline": 2, "data": 2}, {"pipeline": "interleaved"}),
        ((3, 4), {"pipeline": 4}, {"pipeline.recompute": False}),
    ],
    ids=["interleaved, empty slots", "kept, blocks change their stage"],
)
def test_stages_run_the_blocks_of_a_line_in_order(
    num_blocks, mesh, settings, monkeypatch
):
    """Fails if a block is run twice, never, on other weights or before another."""
    model = two_segments.resized(monkeypatch, *num_blocks)
    loop = loss_of(model.stack, Execution(layers_per_scan=1))
    alone = dataclasses.replace(model, loss=loop, takes_layers_apart=False)
    expected = metrics_of(1, {"zero": {"stage": 0}}, alone, number=4)
    settings = settings | {"mesh": mesh, "zero": {"stage": 2}}
    found = metrics_of(math.prod(mesh.values()), settings, model, number=4)
    assert_same(found, expected)


def loss_by_hand(params, batch, key):
    """Loss and metrics, block by block."""
    x, number, adds, ups, sizes = batch["x"] @ params["embed"], 0, [], [], []
    for name, (num_blocks, _) in two_segments.SEGMENTS.items():
        for i in range(num_blocks):
            number += 1
            up = jnp.tanh(x @ params[name]["up"][i])
            noise = jax.random.uniform(block_key(key, number))
            x = x + (1 + noise) * up @ params[name]["down"][i]
            ups.append(jnp.abs(up).mean())
            if name == "wide":
                adds.append(0.1 * (x**2).mean())
                sizes.append(jnp.abs(x).mean())
    error = ((x @ params["head"] - batch["y"]) ** 2).mean()
    metrics = {"auxiliary_loss": sum(adds), "error": error}
    metrics |= {"up": sum(ups) / len(ups), "size": sum(sizes) / len(sizes)}
    return error + sum(adds), metrics


@pytest.mark.parametrize("layers_per_scan", [0, 1, 2])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_loss_of_a_stack_is_that_of_its_blocks(layers_per_scan, policy):
    """Fails if a loop or recomputation changes a key, or what is added up."""
    params = two_segments.init(jax.random.key(1))
    batch = jax.tree.map(jnp.asarray, two_segments.make_batch())
    key = jax.random.key(2)
    loss_fn = loss_of(two_segments.STACK, Execution(layers_per_scan, policy))

    def loss(params):
        found = loss_fn(params, {}, batch, key)
        return found.value, dict(found.metrics)

    def by_hand(params):
        return loss_by_hand(params, batch, key)

    found, expected = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in (loss, by_hand)
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_metrics_of_the_same_name_are_refused():
    def head(params, x, batch):
        total, weight, _ = two_segments.head(params, x, batch)
        return total, weight, {"size": total, "auxiliary_loss": total}

    stack = dataclasses.replace(two_segments.STACK, head=head)
    params = two_segments.init(jax.random.key(1))
    batch = jax.tree.map(jnp.asarray, two_segments.make_batch())
    with pytest.raises(ModelError) as error:
        loss_of(stack)(params, {}, batch, None)
    assert str(error.value) == (
        "metrics/auxiliary_loss='float32' is given twice, by blocks or head; rename "
        "one of them\n"
        "metrics/size='float32' is given twice, by blocks or head; rename one of them"
    )
