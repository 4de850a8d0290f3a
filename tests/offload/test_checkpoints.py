"""Checkpoints and weights go from a state in one memory to a state in another."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from tests.support.offload import (
    GPT,
    LLAMA,
    in_memory,
    make_config,
    memories,
    start,
    train,
    weights_of,
)
from tests.support.tiles import cut
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.replicas.state import saved_rows, saved_state
from zjax.settings import schema
from zjax.weights.saved import SavedArrays
from zjax.weights.source import name_leaves

MEMORIES = ("device", "pinned_host")


def save(run, state, directory):
    store = Store(str(directory))
    rows = saved_rows(run.plan, run.config)
    store.save(int(state.step), saved_state(state, run.plan), rows, extra={})
    store.wait()
    return store


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("device", "pinned_host"),
        pytest.param("pinned_host", "device", marks=pytest.mark.slow),
    ],
)
def test_exported_weights_are_the_same_file_and_start_any_run(tmp_path, here, there):
    """Fails if layers stored one by one are exported so, or weights are read twice,
    or not cast for use."""
    run = start(make_config(here))
    state, _ = train(run, 1)
    path = tmp_path / "model.safetensors"
    export_safetensors(save(run, state, tmp_path / "run"), str(path))
    tensors = safetensors.numpy.load_file(path)
    kernel = "blocks.attention.query.kernel"
    assert tensors[kernel].shape[0] == GPT.num_layers
    expected = weights_of(state)
    np.testing.assert_array_equal(
        tensors[kernel], expected["blocks"]["attention"]["query"]["kernel"]
    )
    config = make_config(
        there,
        zero={"parameter_memory": there},
        optimizer={"rule": "muon"},
        precision={"compute_dtype": "bfloat16"},
    )
    checkpoint = schema.Checkpoint(init_from=str(path))
    other = start(dataclasses.replace(config, checkpoint=checkpoint))
    jax.tree.map(np.testing.assert_array_equal, weights_of(other.state), expected)
    assert memories((other.state.master, other.state.opt_state)) == {there}
    train(other, 1)


@pytest.mark.parametrize("here", MEMORIES)
def test_checkpoint_of_another_number_of_layers_is_refused(tmp_path, here):
    run = start(make_config(here))
    store = save(run, run.state, tmp_path)
    there = "device" if here == "pinned_host" else "pinned_host"
    deeper = start(make_config(there, model=dataclasses.replace(GPT, num_layers=4)))
    with pytest.raises(CheckpointError) as error:
        store.restore(saved_rows(deeper.plan, deeper.config))
    assert "differs from this model in" in str(error.value)


FORMS = [
    ("pinned_host", 3),
    ("device", 6),
    ("pinned_host", 1),
    ("device", 1),
]
"""Memories and tiles, as one checkpoint goes from each to the next."""


@pytest.mark.slow
def test_checkpoints_restore_to_any_number_of_tiles(tmp_path, monkeypatch):
    """Fails if a tile is read from the place of another, or along another dim, or a
    stack once for each of its tiles."""
    reads, whole = collections.Counter(), SavedArrays.read

    def counted(saved, name):
        reads[name] += 1
        return whole(saved, name)

    monkeypatch.setattr(SavedArrays, "read", counted)
    config = make_config("device", model=LLAMA)
    first = start(config)
    state, _ = train(first, 1)
    stores, restored = [save(first, state, tmp_path / "0")], state
    for number, (memory, tiles) in enumerate(FORMS, start=1):
        model = dataclasses.replace(LLAMA, mlp_tiles=tiles)
        run = start(make_config(memory, 3, model=model))
        reads.clear()
        restored, _ = stores[-1].restore(saved_rows(run.plan, run.config))
        assert memory == "device" or max(reads.values(), default=0) <= 1
        stores.append(save(run, restored, tmp_path / str(number)))
        wanted = cut(weights_of(state), tiles)
        found = name_leaves(weights_of(restored))
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            np.testing.assert_array_equal(x, wanted[name], err_msg=name)
    expected, found = (name_leaves(in_memory(x.opt_state)) for x in (state, restored))
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    for store in stores:
        path = tmp_path / "model.safetensors"
        export_safetensors(store, str(path))
        tensors = safetensors.numpy.load_file(path)
        for name, x in cut(weights_of(state), 1).items():
            np.testing.assert_array_equal(tensors[name.replace("/", ".")], x)


@pytest.mark.slow
def test_moments_with_scales_are_not_cut_into_tiles(tmp_path):
    """Fails if codes are restored beside the scales of other tiles."""
    config = make_config("pinned_host", optimizer={"moment_dtype": "int8"})
    store = save(run := start(config), run.state, tmp_path)
    model = dataclasses.replace(GPT, mlp_tiles=3)
    other = start(dataclasses.replace(config, model=model))
    with pytest.raises(CheckpointError, match="differs from this model in"):
        store.restore(saved_rows(other.plan, other.config))
