"""Layers that pass through the devices tile by tile."""

import dataclasses
import math

import jax
import numpy as np

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
from tests.support.tiles import cut, first_weights_of
from zjax.offload import init, units
from zjax.offload.compiled import added_bytes
from zjax.offload.shapes import PassShapes
from zjax.weights.source import name_leaves

TILES = 3
ROUNDING = "blocks/attention/key/bias"
"""Adds the same to all scores of a query, so that its gradient is but rounding."""
AWAY = {"parameter_memory": "pinned_host", "gradient_memory": "pinned_host"}


def with_tiles(config, tiles):
    model = dataclasses.replace(config.model, mlp_tiles=tiles)
    return dataclasses.replace(config, model=model)


def assert_same_run(config, memory="pinned_host"):
    """Fails if a run with tiles computes anything else than one without them."""
    tiled = with_tiles(config, TILES)
    tiled = on_device(tiled) if memory == "device" else tiled
    runs = [start(x, weights=first_weights_of(x)) for x in (config, tiled)]
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


def test_tiles_add_up_to_the_layer():
    """Fails if a tile is left out of the stream, of its cotangent, or of dropout."""
    model = dataclasses.replace(GPT, dropout_rate=0.3)
    config = make_config("pinned_host", 3, zero=AWAY, model=model, num_microbatches=2)
    state = assert_same_run(config)
    assert memories(state.master["blocks"]["mlp"]["tiles"]) == {"pinned_host"}


def test_tiles_without_offload_are_the_same_model():
    """Fails if a model with tiles cannot be used where its state is on the devices."""
    model = dataclasses.replace(LLAMA, dropout_rate=0.3)
    assert_same_run(make_config("device", model=model), "device")


HUGE = dataclasses.replace(LLAMA, num_layers=1, mlp_size=2048)


def start_huge(monkeypatch, tiles, weights=None, **changes):
    """One layer that is nearly all feed-forward, without room but for what runs."""
    monkeypatch.setattr(units, "AHEAD_BYTES", 0)
    config = make_config("pinned_host", 3, zero=AWAY, model=HUGE, **changes)
    run = start(with_tiles(config, tiles), weights=weights)
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


def test_a_few_tiles_are_on_the_devices_in_a_step(monkeypatch):
    """Fails if parameters, gradients or state of tiles stay after their use."""
    largest = {}
    for tiles in (1, 8):
        run, step = start_huge(monkeypatch, tiles, **UNDER_BACKWARD)
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
        start_huge(monkeypatch, tiles, weights=())
        monkeypatch.setattr(init, "_creator", creator)
        largest[tiles] = max(sizes)
    assert largest[8] < largest[1] / 6
