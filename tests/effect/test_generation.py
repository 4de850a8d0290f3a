"""The devices of a mesh must split the pages of a text that is generated."""

import re

import jax
import numpy as np
import pytest

from tests.support import features
from zjax.generation import programs
from zjax.generation.by_unit import UnitDecoder
from zjax.run import fused
from zjax.sharding import plan as plans

pytestmark = pytest.mark.usefixtures("greedy")

ROWS, PROMPT, NUM_NEW = 8, 4, 7
MESHES = pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ("mesh.data=4 mesh.tensor=2", 2),
        (features.EXPERTS + "mesh.data=2 mesh.expert=2 mesh.tensor=2", 2),
        ("mesh.data=2 mesh.sequence=2 mesh.tensor=2 zero.stage=2", 1),
        ("model.num_kv_heads=1 mesh.data=4 mesh.tensor=2", 1),
    ],
    ids=["heads", "experts", "sequence", "copied heads"],
)
"""Heads of 4, or of a copy for each device, that a device holds."""


@pytest.fixture(autouse=True)
def _small_arrays_are_moved(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)


def start(settings):
    """A run with blocks where they should be, and the prompts of a text."""
    run = features.start(features.config_of(settings))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(run.state.params)}
    assert ("pinned_host" in kinds) == ("pinned_host" in settings)
    return run, np.random.default_rng(0).integers(0, 41, (ROWS, PROMPT))


@pytest.fixture
def compiled(monkeypatch):
    """The text of each program that adds tokens to rows."""
    real, texts = programs._run_steps, []

    def watched(placed):
        program = real(placed)

        def run(*args):
            texts.append(program.lower(*args).compile().as_text())
            return program(*args)

        return run

    monkeypatch.setattr(programs, "_run_steps", watched)
    return texts


@MESHES
def test_devices_split_pages_in_the_loop(settings, heads, compiled):
    """Fails if a device carries heads of other devices from token to token."""
    run, prompts = start(settings + " model.num_layers=2")
    run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    loops = [x.split(" while(")[0] for x in compiled[0].splitlines() if " while(" in x]
    found = [re.findall(r"f32\[\d+,(\d+),64,4\]", loop) for loop in loops]
    # Attention loops over pages inside of the loop over tokens.
    carried = max(found, key=len)
    assert carried == 2 * run.config.model.num_layers * [str(heads)]


def test_weights_are_gathered_once(compiled):
    """Fails if each token gathers the weights that ZeRO splits."""
    run, prompts = start("mesh.data=4 mesh.tensor=2 zero.stage=3")
    run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    assert "all-reduce" in compiled[0]
    # The tensor axis still splits the first matrix of the feed-forward.
    assert "f32[16,12]" in compiled[0]
    assert not re.findall(r"f32\[(?:1,)?16,(?:12|24)\]\S* all-gather\(", compiled[0])


def test_weights_that_do_not_fit_are_gathered_block_by_block(monkeypatch, caplog):
    """Fails if a device holds all weights where there is no room, or texts differ."""
    settings = "model.num_layers=3 mesh.data=4 mesh.tensor=2 zero.stage=3"
    run, prompts = start(settings)
    wanted = run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    decoders = []

    def watch(*args):
        decoders.append(UnitDecoder(*args))
        return decoders[-1]

    monkeypatch.setattr(fused, "has_room", lambda _: False)
    monkeypatch.setattr(fused, "UnitDecoder", watch)
    with caplog.at_level("WARNING"):
        found = run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    np.testing.assert_array_equal(found, wanted)
    assert "of weights are gathered layer by layer" in caplog.text
    blocks = jax.tree.leaves(decoders[0].stored)
    held = sum(x.addressable_shards[0].data.size for x in blocks)
    assert held < 0.2 * sum(x.size for x in blocks)  # 1 / 8 but for small arrays


@MESHES
def test_devices_split_pages_of_offloaded_blocks(settings, heads, monkeypatch):
    """Fails if pages are replicated after the prompts, or after a token."""
    run, prompts = start(f"{features.HOST}{settings} model.num_layers=2")
    units, shapes = run.step.executor.generation, []
    real = units.read

    def watched(*args):
        results = real(*args)
        pages = jax.tree.leaves(results[1])
        shapes.extend(x.sharding.shard_shape(x.shape)[1:] for x in pages)
        return results

    monkeypatch.setattr(units, "read", watched)
    run.generate(run.state, prompts, max_new_tokens=3)
    assert shapes == 3 * 2 * run.config.model.num_layers * [(heads, 64, 4)]


@pytest.mark.parametrize("where", ["", features.HOST], ids=["device", "host"])
def test_rings_leave_the_order_of_a_text(where):
    """Fails if the prompts lie in the order of ring attention, which hides tokens."""
    texts = []
    for mesh in ("mesh.data=8", "mesh.data=2 mesh.sequence=4"):
        ring = "model.sequence_attention=ring " if "sequence" in mesh else ""
        run, prompts = start(f"{where}{features.LLAMA}{ring}{mesh} model.num_layers=1")
        texts.append(np.asarray(run.generate(run.state, prompts, max_new_tokens=8)))
    np.testing.assert_array_equal(*texts)
