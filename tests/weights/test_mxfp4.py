"""Experts of gpt-oss go out in the layout of OpenAI, and the reader takes them."""

import dataclasses

import numpy as np
import pytest

from tests.support.quantized import plain_mxfp4
from tests.support.refusals import checkpoint_error, config_error
from tests.weights.test_compressed_tensors import (
    arrays_of,
    golden_tensors,
    read,
    source_of,
    write,
)
from zjax.weights import mxfp4, quantized
from zjax.weights.tensors import layouts_of

HALVES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_values_are_the_nearest_that_a_scale_allows():
    """Fails if a scale clips, is twice too large, or a code is not the nearest."""
    rng = np.random.default_rng(0)
    array = rng.normal(size=(2, 64, 3)).astype(np.float32)
    array[0, :32, 0] = 0
    array[1, 5, 2] = 1e4
    array[1, 32:, 1] = 6.0  # the last code of a scale of 1
    blocks, scales = mxfp4.encode("w", array)
    assert (blocks.shape, scales.shape) == ((2, 3, 2, 16), (2, 3, 2))
    assert scales[1, 1, 1] == 127
    back = plain_mxfp4(blocks, scales)
    for expert, output, block in np.ndindex(scales.shape):
        rows = slice(32 * block, 32 * block + 32)
        some = array[expert, rows, output].astype(float)
        factor = 2.0 ** (int(scales[expert, output, block]) - 127)
        largest = np.abs(some).max()
        assert largest <= 6 * factor
        assert largest == 0 or largest > 3 * factor
        distances = np.abs(np.abs(some)[:, np.newaxis] / factor - HALVES).min(1)
        error = np.abs(back[expert, rows, output] - some) / factor
        np.testing.assert_allclose(error, distances, atol=1e-5)


def test_given_scales_recover_the_codes():
    """Fails if scales are computed again: no block has its last code."""
    rng = np.random.default_rng(1)
    codes = rng.choice(HALVES[:4], (2, 64, 3)).astype(np.float32)
    exponents = rng.integers(-9, -3, (2, 2, 3))
    scales = np.repeat(2.0**exponents, 32, 1).astype(np.float32)
    blocks, found = mxfp4.encode("w", codes * scales, scales)
    np.testing.assert_array_equal(plain_mxfp4(blocks, found), codes * scales)
    np.testing.assert_array_equal(found, exponents.transpose(0, 2, 1) + 127)
    with checkpoint_error(
        "tensor='w' has a scale that is no power of two; quantise it again"
    ):
        mxfp4.encode("w", codes, scales * 3)


def test_the_reader_takes_what_is_written(tmp_path):
    """Of a gpt-oss whose experts have whole blocks."""
    _, model, kind = golden_tensors("gpt_oss")
    model = dataclasses.replace(
        model, embed_size=32, moe=dataclasses.replace(model.moe, expert_size=32)
    )
    rng = np.random.default_rng(2)
    arrays = {
        tensor: rng.normal(size=layout.tensor_shape).astype(np.float32)
        for _, layout in layouts_of(quantized.FAMILIES[kind].rows, model)
        for tensor in layout.tensors.values()
    }
    source = source_of(**arrays)
    found, values = quantized.compress(source, model, kind, "mxfp4")
    sizes = {"hidden_size": 32, "intermediate_size": 32}
    write(tmp_path / "plain", "gpt_oss", source, None, **sizes)
    write(tmp_path / "out", "gpt_oss", found, values, **sizes)
    plain = arrays_of("gpt_oss", tmp_path / "plain")
    back = arrays_of("gpt_oss", tmp_path / "out")
    assert back.keys() == plain.keys()
    for name, array in plain.items():
        if ".experts." in name and name.split("[")[0].endswith("kernel"):
            error = np.abs(back[name] - array).max() / np.abs(array).max()
            assert 0 < error < 1 / 6
        else:
            np.testing.assert_array_equal(back[name], array)
    for name, array in read(found).items():
        assert array.dtype == found.entries[name].dtype


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (
            "llama",
            "is the layout of gpt_oss alone, and this model is of llama; use w4a16, "
            "w8a8 or fp8",
        ),
        (
            "gpt_oss",
            "has blocks of 32 inputs, which do not divide 12; leave out --quantize",
        ),
    ],
)
def test_other_models_are_refused(family, problem):
    with config_error(f"--quantize='mxfp4' {problem}"):
        quantized.compress(*golden_tensors(family), "mxfp4")
