"""Layers that pass through the devices tile by tile."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests.support.cases import some_by_hand
from tests.support.offload import (
    GPT,
    LLAMA,
    UNDER_BACKWARD,
    arrays_besides,
    make_batch,
    make_config,
    memories,
    on_device,
    start,
    train,
    weights_of,
)
from tests.support.tiles import cut, started_from_the_same
from zjax.checkpoint.layout import name_leaves
from zjax.offload import init, units
from zjax.offload.compiled import added_bytes
from zjax.offload.shapes import PassShapes

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
    "stage 3, dropout, two microbatches": {
        "stage": 3,
        "zero": AWAY,
        "model": dataclasses.replace(GPT, dropout_rate=0.3),
        "num_microbatches": 2,
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
    if memory == "device":
        configs[1] = on_device(configs[1])
    runs = [
        start(started_from_the_same(c, directory), devices=devices) for c in configs
    ]
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


BY_HAND = CASES.keys() - {"stage 3, dropout, two microbatches"}
"""What the other case holds among more, and gates below, without offload."""


@pytest.mark.parametrize("case", some_by_hand(CASES, BY_HAND))
def test_tiles_add_up_to_the_layer(tmp_path, case):
    """Fails if a tile is left out of the stream, of its cotangent, or of dropout."""
    state = assert_same_run(make_config("pinned_host", **CASES[case]), tmp_path)
    assert memories(state.master["blocks"]["mlp"]["tiles"]) == {"pinned_host"}


@pytest.mark.slow
def test_tiles_on_one_device(tmp_path):
    config = make_config("pinned_host", 0, zero=AWAY, num_microbatches=2)
    assert_same_run(config, tmp_path, devices=jax.devices()[:1])


def test_tiles_without_offload_are_the_same_model(tmp_path):
    """Fails if a model with tiles cannot be used where its state is on the devices."""
    model = dataclasses.replace(LLAMA, dropout_rate=0.3)
    assert_same_run(make_config("device", model=model), tmp_path, memory="device")


HUGE = dataclasses.replace(LLAMA, num_layers=1, mlp_size=2048)


def start_huge(monkeypatch, tiles, **changes):
    """One layer that is nearly all feed-forward, without room but for what runs."""
    monkeypatch.setattr(units, "AHEAD_BYTES", 0)
    config = make_config("pinned_host", 3, zero=AWAY, model=HUGE, **changes)
    run = start(with_tiles(config, tiles))
    step = run.step.executor.step
    step.stream.limit = 0
    return run, step


def test_a_tile_is_all_that_passes_through_the_devices(monkeypatch):
    """Fails if whole layers come up, leave, or are updated or computed with."""
    found = {}
    for tiles in (1, 8):
        run, step = start_huge(monkeypatch, tiles, **UNDER_BACKWARD)
        peak = run.step.predict_peak(make_batch(0))
        back = step.backward
        shapes = (back.programs, back.units, back.saved_rows, make_batch(0))
        programs = PassShapes(*shapes).bytes
        found[tiles] = {
            "largest update": max(step.group_bytes),
            "room for parameters": step.backward.units.stream.limit,
            "backward": max(b for n, b in programs.items() if n.endswith("backward")),
            "forward": max(programs["forward"], programs.get("tile", 0)),
            "update": max(added_bytes(*x) for x in step.update.abstract_calls()),
            "peak": peak.total,
        }
    for name, whole in found[1].items():
        assert found[8][name] < whole / 6, name
    assert peak.moment == "tile, backward"
    of_tile = step.update.groups[1].state
    assert step.group_bytes[1] == sum(step.rows[i].device_bytes for i in of_tile)
    assert max(step.group_bytes) == step.group_bytes[1]


def bytes_on_first_device(arrays):
    """Without a look at their shards, each of which were one more array that exists."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in arrays
        if x.sharding.memory_kind == "device"
        and jax.devices()[0] in x.sharding.device_set
    )


@pytest.mark.parametrize("waits", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_few_tiles_are_on_the_devices_in_a_step(monkeypatch, waits):
    """Fails if parameters, gradients or state of tiles stay after their use."""
    largest = {}
    for tiles in (1, 8):
        changes = {} if waits else UNDER_BACKWARD
        run, step = start_huge(monkeypatch, tiles, **changes)
        seen, before = [], jax.live_arrays()  # some of earlier tests may go in mid-step
        for owner in (step.backward.programs, step.backward.units.stream, step.stream):
            for name in ("block_backward", "tile_backward", "_copy_next", "release"):
                if hasattr(owner, name):
                    noted = noting(getattr(owner, name), seen, before)
                    monkeypatch.setattr(owner, name, noted)
        train(run, 1)
        largest[tiles] = max(seen)
    assert largest[8] < largest[1] / 3


def noting(run, seen, before):
    def noted(*args):
        results = run(*args)
        seen.append(bytes_on_first_device(arrays_besides(before)))
        return results

    return noted


def test_a_state_starts_tile_by_tile(monkeypatch):
    """Fails if a program makes more than a tile of the first weights."""
    largest = {}
    for tiles in (1, 8):
        sizes, creator = [], init._creator

        def counted(model, layers, rows, own, creator=creator, sizes=sizes):
            sizes.append(sum(rows[i].device_bytes for i in own))
            return creator(model, layers, rows, own)

        monkeypatch.setattr(init, "_creator", counted)
        start_huge(monkeypatch, tiles)
        monkeypatch.setattr(init, "_creator", creator)
        largest[tiles] = max(sizes)
    assert largest[8] < largest[1] / 6
