"""Codes are made from the matrices of a checkpoint, and leave as matrices."""

import jax
import numpy as np
import pytest

from tests.weights import test_adapters as runs
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.start import open_weights
from zjax.checkpoint.store import Store
from zjax.run.saving import restore, save
from zjax.weights import codes as coding
from zjax.weights import pieces
from zjax.weights.source import Entry, Source

pytest.importorskip("qwix", reason="needs qwix")

CODES = ("lora.rank=2", "lora.quantize=int4", "lora.quantize.block_size=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from a Hugging Face checkpoint, its loss after three steps, saved."""
    folder = tmp_path_factory.mktemp("quantized") / "run"
    run = runs.start(*CODES)
    state = run.state
    for _ in range(3):
        state, _ = run.step(state, runs.BATCH)
    save(folder, state, run)
    return folder, runs.loss(run, state)


def test_matrices_are_quantised_as_they_are_read(monkeypatch):
    """Fails if a device gets a matrix, or slices have other codes than the whole."""
    sent = []
    monkeypatch.setattr(pieces, "_SMALL_BYTES", 0)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 1 << 10)
    put = jax.device_put

    def device_put(x, *args, **kwargs):
        sent.extend(jax.tree.leaves(x))
        return put(x, *args, **kwargs)

    monkeypatch.setattr(pieces.jax, "device_put", device_put)
    run = runs.start(*CODES)
    blocks = run.state.master["blocks"]
    num_codes = sum(x.size for x in sent if x.dtype == "int4")
    assert num_codes == 2 * 16 * (24 + 12 + 12 + 24 + 3 * 24)
    others = [x for x in jax.tree.leaves(run.state.master) if x.dtype != "int4"]
    assert sum(x.size for x in sent) - num_codes <= sum(x.size for x in others)
    codes, scales = (np.asarray(blocks["mlp"]["down"][n]) for n in ("kernel", "scales"))
    kernel = runs.start().state.master["blocks"]["mlp"]["down"]["kernel"]
    steps = np.repeat(scales, 2, 1)
    error = np.abs(codes.astype(np.float32) * steps - kernel)
    assert error.max() > 0 and (error <= steps / 2 * (1 + 1e-5)).all()


def test_slices_have_the_codes_of_the_whole():
    """Fails if a block that two slices share gets two scales."""
    kernel = np.random.default_rng(0).normal(size=(2, 12, 3)).astype(np.float32)
    source = Source(
        {"up.kernel": Entry(kernel.shape, "float32")}, lambda name, index: kernel[index]
    )
    wanted = {
        "up.kernel": Entry(kernel.shape, "int8"),
        "up.scales": Entry((2, 3, 3), "float32"),
    }
    view = coding.with_codes(source, wanted)
    codes = view.read_all("up.kernel")
    for start, stop in ((0, 3), (3, 9), (5, 6), (8, 12)):
        index = (slice(1, 2), slice(start, stop), slice(0, 2))
        np.testing.assert_array_equal(view.read("up.kernel", index), codes[index])
    scales = view.read_all("up.scales")
    index = (slice(0, 1), slice(1, 3), slice(1, 3))
    np.testing.assert_array_equal(view.read("up.scales", index), scales[index])
    back = coding.without_codes(view)
    assert back.entries == source.entries
    index = (slice(0, 2), slice(3, 10), slice(1, 3))
    expected = codes[index] * np.repeat(scales, 4, 1)[index]
    np.testing.assert_allclose(back.read("up.kernel", index), expected, rtol=1e-6)


def test_state_is_restored(trained):
    """Fails if codes or scales are no part of a checkpoint."""
    folder, expected = trained
    run = runs.start(*CODES)
    state, _ = restore(folder, run)
    np.testing.assert_allclose(runs.loss(run, state), expected, rtol=1e-6)


def test_merged_weights_have_the_loss_of_the_run(trained, tmp_path):
    """Fails if codes go out in place of matrices, or adapters are lost."""
    folder, expected = trained
    plain = runs.start(f"checkpoint.init_from={folder}")
    np.testing.assert_allclose(runs.loss(plain), expected, rtol=1e-5)
    export_huggingface(Store(str(folder)), str(tmp_path / "out"))
    run = runs.start(directory=tmp_path / "out")
    np.testing.assert_allclose(runs.loss(run), expected, rtol=1e-5)
    source, _ = open_weights(Store(str(folder)))
    assert not any("scales" in name for name in source.entries)


def test_scales_beside_numbers_are_no_codes():
    """A layer of a user may have such names, too."""
    entries = {
        "up.kernel": Entry((4, 3), "float32"),
        "up.scales": Entry((3,), "float32"),
    }
    source = Source(entries, lambda name, index: np.ones(entries[name].shape)[index])
    assert coding.without_codes(source).entries == entries
    assert coding.with_codes(source, entries).entries == entries
