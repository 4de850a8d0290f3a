"""Layers that pass through the devices tile by tile."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.offload import (
    GPT,
    LLAMA,
    UNDER_BACKWARD,
    make_batch,
    make_config,
    memories,
    start,
    train,
    weights_of,
)
from tests.support.tiles import cut, started_from_the_same
from zjax.checkpoint.layout import name_leaves

TILES = 3
ROUNDING = "blocks/attention/key/bias"
"""Adds the same to all scores of a query, so that its gradient is but rounding."""
AWAY = {"parameter_memory": "pinned_host", "gradient_memory": "pinned_host"}
CASES = {
    "stage 1": {"stage": 1, "zero": AWAY},
    "stage 2, two microbatches": {"stage": 2, "zero": AWAY, "num_microbatches": 2},
    "stage 3, gated, two microbatches": {
        "stage": 3,
        "zero": AWAY,
        "model": LLAMA,
        "num_microbatches": 2,
    },
    "stage 3, dropout": {
        "stage": 3,
        "zero": AWAY,
        "model": dataclasses.replace(GPT, dropout_rate=0.3),
    },
    "under the backward pass": {"zero": AWAY, "model": LLAMA, **UNDER_BACKWARD},
    "parameters and gradients on the devices": {
        "model": dataclasses.replace(GPT, activation_memory="pinned_host")
    },
}


def with_tiles(config, tiles):
    model = dataclasses.replace(config.model, mlp_tiles=tiles)
    return dataclasses.replace(config, model=model)


def assert_same_run(config, directory, *, devices=None, memory="pinned_host"):
    """Fails if a run with tiles computes anything else than one without them."""
    configs = [with_tiles(config, tiles) for tiles in (1, TILES)]
    zero = dataclasses.replace(config.zero, optimizer_memory=memory)
    configs[1] = dataclasses.replace(configs[1], zero=zero)
    runs = [start(started_from_the_same(c, directory), devices=devices) for c in configs]
    (expected, metrics), (state, found) = map(train, runs)
    for x, y in zip(found, metrics, strict=True):
        np.testing.assert_allclose([*x.values()], [y[name] for name in x], 1e-6)
    losses = [
        float(run.step.evaluate(each, make_batch(9))["loss"])
        for run, each in zip(runs, (expected, state), strict=True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    arrays, wanted = name_leaves(weights_of(state)), cut(weights_of(expected), TILES)
    assert arrays.keys() == wanted.keys()
    for name, x in arrays.items():
        if name != ROUNDING:
            error = np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name])
            assert error <= 1e-6, name
    return state


@pytest.mark.parametrize("case", CASES)
def test_tiles_add_up_to_the_layer(tmp_path, case):
    """Fails if a tile is left out of the stream, of its cotangent, or of dropout."""
    state = assert_same_run(make_config("pinned_host", **CASES[case]), tmp_path)
    assert memories(state.master["blocks"]["mlp"]["tiles"]) == {"pinned_host"}


def test_tiles_on_one_device(tmp_path):
    config = make_config("pinned_host", 0, zero=AWAY, num_microbatches=2)
    assert_same_run(config, tmp_path, devices=jax.devices()[:1])


def test_tiles_without_offload_are_the_same_model(tmp_path):
    """Fails if a model with tiles cannot be used where its state is on the devices."""
    model = dataclasses.replace(GPT, dropout_rate=0.3)
    assert_same_run(make_config("device", model=model), tmp_path, memory="device")
