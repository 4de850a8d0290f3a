"""The devices of a mesh must split the cache of a text that is generated."""

import re

import jax
import numpy as np
import pytest

from tests.support import features
from zjax.models import generate
from zjax.sharding import plan as plans

ROWS, PROMPT, NUM_NEW = 8, 4, 7
MESHES = pytest.mark.parametrize(
    ("settings", "rows", "heads"),
    [
        ("mesh.data=4 mesh.tensor=2", 2, 2),
        (features.EXPERTS + "mesh.data=2 mesh.expert=2 mesh.tensor=2", 2, 2),
        ("mesh.data=2 mesh.sequence=2 mesh.tensor=2 zero.stage=2", 4, 1),
        ("model.num_kv_heads=1 mesh.data=4 mesh.tensor=2", 2, 1),
    ],
    ids=["rows and heads", "experts", "sequence", "copied heads"],
)
"""Rows and heads of 8 rows and 4 heads that a device holds."""


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
    """The text of each program that writes a text at once."""
    real, texts = generate._generate, []

    def watched(*args, **settings):
        texts.append(real.lower(*args, **settings).compile().as_text())
        return real(*args, **settings)

    monkeypatch.setattr(generate, "_generate", watched)
    return texts


@MESHES
def test_devices_split_a_cache_in_the_loop(settings, rows, heads, compiled):
    """Fails if a device carries rows or heads of other devices from token to token."""
    run, prompts = start(settings)
    run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    (text,) = compiled
    loops = (x for x in text.splitlines() if " while(" in x and "[8,11]" in x)
    carried = re.findall(r"f32\[(\d+),11,(\d+),4\]", next(loops).split(" while(")[0])
    assert carried == 2 * run.config.model.num_layers * [(str(rows), str(heads))]


def test_weights_stay_split_while_a_text_is_written(compiled):
    """Fails if a device gathers the weights that ZeRO splits."""
    run, prompts = start("mesh.data=4 mesh.tensor=2 zero.stage=3")
    run.generate(run.state, prompts, max_new_tokens=NUM_NEW)
    (text,) = compiled
    assert "all-reduce" in text
    # The share of the tensor axis in the first matrix of the feed-forward.
    assert not re.findall(r"f32\[1?,?16,12\]\S* all-gather\(", text)


@MESHES
def test_devices_split_caches_of_offloaded_blocks(settings, rows, heads, monkeypatch):
    """Fails if a cache is replicated after the prompts, or after a token."""
    run, prompts = start(features.HOST + settings)
    programs, shapes = run.step.executor.generation, []
    real = programs.read

    def watched(*args):
        results = real(*args)
        caches = jax.tree.leaves(results[1])
        shapes.extend(x.sharding.shard_shape(x.shape) for x in caches)
        return results

    monkeypatch.setattr(programs, "read", watched)
    run.generate(run.state, prompts, max_new_tokens=3)
    assert shapes == 3 * 2 * run.config.model.num_layers * [(rows, 7, heads, 4)]


@pytest.mark.parametrize("where", ["", features.HOST], ids=["device", "host"])
def test_rings_leave_the_order_of_a_text(where):
    """Fails if the prompts lie in the order of ring attention, which hides tokens."""
    texts = []
    for mesh in ("mesh.data=8", "mesh.data=2 mesh.sequence=4"):
        ring = "model.sequence_attention=ring " if "sequence" in mesh else ""
        run, prompts = start(where + features.LLAMA + ring + mesh)
        texts.append(np.asarray(run.generate(run.state, prompts, max_new_tokens=8)))
    np.testing.assert_array_equal(*texts)
