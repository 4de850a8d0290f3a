"""Adapters start from a checkpoint's weights, and leave merged into them."""

from concurrent.futures import Future

import jax
import numpy as np
import pytest

from tests.support import huggingface as golden
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.start import open_weights
from zjax.checkpoint.store import Store
from zjax.run.saving import restore, save
from zjax.weights.adapters import with_adapters
from zjax.weights.source import Entry, Source

TOKENS = np.random.default_rng(0).integers(0, 60, (8, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
QUICK = (
    "optimizer.schedule.num_warmup_steps=0",
    "optimizer.peak_learning_rate=0.05",
    "precision.compute_dtype=float32",
)


def start(*overrides, **settings):
    return golden.start(golden.make_config("llama", *QUICK, *overrides, **settings))


def loss(run, state=None):
    return float(run.evaluate(run.state if state is None else state, BATCH)["loss"])


FORMS = {
    "lora": ("lora.rank=2",),
    "dora, averaged": ("lora.rank=2", "lora.form=dora", "optimizer.ema_decay=0.9"),
}


@pytest.fixture(scope="module", params=FORMS)
def trained(request, tmp_path_factory):
    """A run from a Hugging Face checkpoint, its loss after three steps, saved."""
    folder = tmp_path_factory.mktemp("run")
    run = start(*FORMS[request.param])
    np.testing.assert_allclose(loss(run), loss(start()), rtol=1e-6)
    state = run.state
    for _ in range(3):
        state, _ = run.step(state, BATCH)
    after = loss(run, state)
    assert abs(after - loss(start())) > 0.05
    save(folder / "run", state, run)
    return folder / "run", after, FORMS[request.param]


def test_merged_weights_have_the_loss_of_the_run(trained):
    """Fails if a merge forgets the factor or the lengths of columns."""
    folder, expected, _ = trained
    run = start(f"checkpoint.init_from={folder}")
    np.testing.assert_allclose(loss(run), expected, rtol=1e-5)


def test_transformers_gets_merged_weights(trained, tmp_path):
    """Fails if the frozen weights alone go out."""
    folder, expected, _ = trained
    export_huggingface(Store(str(folder)), str(tmp_path / "out"))
    run = start(directory=tmp_path / "out")
    np.testing.assert_allclose(loss(run), expected, rtol=1e-5)


def test_slices_are_those_of_the_whole_array(trained):
    """Fails if a merge takes a slice of a matrix for the matrix."""
    source, _ = open_weights(Store(str(trained[0])))
    name = "blocks/attention/query/kernel"
    whole = source.read_all(name)
    index = (slice(1, 2), slice(3, 9), *(slice(0, n) for n in whole.shape[2:]))
    np.testing.assert_array_equal(source.read(name, index), whole[index])
    assert not any("lora" in name for name in source.entries)


def test_state_with_adapters_is_restored(trained):
    """Fails if adapters are no part of a checkpoint."""
    folder, expected, settings = trained
    run = start(*settings)
    state, _ = restore(folder, run)
    np.testing.assert_allclose(loss(run, state), expected, rtol=1e-6)
    names = jax.tree_util.tree_leaves_with_path(state.master)
    assert any("lora" in str(keys) for keys, _ in names)


def test_frozen_weights_are_restored_in_another_compute_dtype(trained, tmp_path):
    """Fails if a run with adapters cannot be read for float32 or bfloat16."""
    folder, _, settings = trained
    run = start(*settings)
    narrow_run = start(*settings, "precision.compute_dtype=bfloat16")
    before, _ = restore(folder, run)
    narrow, _ = restore(folder, narrow_run)
    save(tmp_path / "narrow", narrow, narrow_run)
    after, _ = restore(tmp_path / "narrow", run)
    jax.tree.map(np.testing.assert_array_equal, narrow.master, after.master)
    assert {str(x.dtype) for x in jax.tree.leaves(after.master)} == {"float32"}

    def rounded(x, plan):
        return x.astype("bfloat16").astype("float32") if plan.is_frozen else x

    expected = jax.tree.map(rounded, before.master, run.plan.master)
    jax.tree.map(np.testing.assert_array_equal, after.master, expected)


def test_lengths_at_the_start_are_of_the_matrix_that_runs():
    """Fails if DoRA starts from lengths of the float32 matrix: its start would differ
    from the model without adapters by the rounding of bfloat16."""
    kernel = np.full((3, 1), 1 + 2**-8, np.float32)  # bfloat16 rounds it to 1
    wanted = {
        f"up/{name}": Entry(shape, "float32")
        for name, shape in {
            "kernel": (3, 1),
            "lora/a": (3, 1),
            "lora/b": (1, 1),
            "lora/magnitude": (1,),
        }.items()
    }
    given = Source({"up/kernel": wanted["up/kernel"]}, lambda _, index: kernel[index])
    source = with_adapters(given, wanted, "bfloat16", lambda _: Future)
    lengths = source.read_all("up/lora/magnitude")
    np.testing.assert_array_equal(lengths, np.sqrt(np.float32([3])))
