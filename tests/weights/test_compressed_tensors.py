"""Matrices go out as codes and scales, and come back."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import huggingface as golden
from tests.support.refusals import checkpoint_error, config_error
from zjax.settings import schema
from zjax.settings.convert import from_mapping
from zjax.weights import codes, huggingface, quantized
from zjax.weights.compressed_tensors import SCHEMES, pack, unpack
from zjax.weights.files import open_files, write_shards
from zjax.weights.source import Entry, Source


def source_of(**arrays):
    entries = {n: Entry(x.shape, str(x.dtype)) for n, x in arrays.items()}
    return Source(entries, lambda name, index: arrays[name][index])


def read(source):
    return {name: source.read_all(name) for name in source.entries}


def reference(weights, bits, group):
    """Codes and scales of one matrix, one number after the other."""
    last = 2 ** (bits - 1) - 1
    codes, scales = np.zeros(weights.shape, int), []
    for row, values in enumerate(weights.tolist()):
        scales.append([])
        for first in range(0, len(values), group):
            some = values[first : first + group]
            scale = np.float32(max(map(abs, some))) / np.float32(last)
            scale = scale or np.finfo(np.float32).tiny
            scales[-1].append(scale)
            for place, x in enumerate(some, first):
                codes[row, place] = round(float(np.float32(x) / scale))
    return codes, np.array(scales, np.float32)


def words_of(codes):
    """Bits of a row of 4-bit codes, as Python integers."""
    words = np.zeros((len(codes), -(-codes.shape[1] // 8)), np.uint32)
    for (row, place), code in np.ndenumerate(codes):
        words[row, place // 8] |= np.uint32((int(code) + 8) << 4 * (place % 8))
    return words.view(np.int32)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_undone(bits, length):
    rng = np.random.default_rng(length)
    half = 2 ** (bits - 1)
    codes = rng.integers(-half, half, (3, length)).astype(np.int8)
    packed = pack(codes, bits)
    assert packed.shape == (3, -(-length * bits // 32))
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(unpack(packed, bits, length), codes)


def test_four_bits_are_packed_lowest_first():
    codes = np.arange(-8, 8, dtype=np.int8)[np.newaxis]
    np.testing.assert_array_equal(pack(codes, 4), words_of(codes))


HARD = {
    "random": np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32),
    "zeros": np.zeros((2, 16), np.float32),
    "one value": np.full((2, 16), -0.3, np.float32),
    "outlier": np.eye(2, 16, dtype=np.float32) * 1e4 + np.float32(0.01),
    "one row": np.linspace(-1, 1, 8, dtype=np.float32)[np.newaxis],
}


@pytest.mark.parametrize("case", HARD)
def test_rounding_is_to_nearest(case):
    plain = source_of(w=HARD[case])
    for name, bits, group in (("w4a16", 4, 8), ("w8a8", 8, HARD[case].shape[1])):
        scheme = dataclasses.replace(SCHEMES[name], group=8 if bits == 4 else 0)
        found = read(quantized.pack_source(plain, ["w"], scheme))
        codes, scales = reference(HARD[case], bits, group)
        np.testing.assert_array_equal(found["w_scale"], scales)
        stored = found["w_packed"] if bits == 4 else found["w"]
        expected = words_of(codes) if bits == 4 else codes.astype(np.int8)
        np.testing.assert_array_equal(stored, expected)
        if bits == 4:
            assert found["w_shape"].tolist() == [*HARD[case].shape]
            assert found["w_shape"].dtype == np.int64


@pytest.mark.parametrize("case", HARD)
def test_eight_bit_floats_are_near(case):
    found = read(quantized.pack_source(source_of(w=HARD[case]), ["w"], SCHEMES["fp8"]))
    assert found["w"].dtype == jnp.float8_e4m3fn
    back = found["w"].astype(np.float32) * found["w_scale"]
    largest = np.abs(HARD[case]).max(1, keepdims=True)
    # Three bits of mantissa; below 2**-6, steps of 2**-9 of the scale.
    bound = np.maximum(np.abs(HARD[case]) * 2**-4, largest / 448 * 2**-10)
    assert (np.abs(back - HARD[case]) <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_fit_the_scales_of_the_file(dtype):
    """Fails if codes are computed by scales of more bits than the file has."""
    weights = HARD["random"]
    scheme = dataclasses.replace(SCHEMES["w4a16"], group=8)
    found = read(
        quantized.pack_source(source_of(w=weights), ["w"], scheme, dtype=dtype)
    )
    assert found["w_scale"].dtype == jnp.dtype(dtype)
    codes = unpack(found["w_packed"], 4, 16).reshape(3, 2, 8)
    scales = found["w_scale"].astype(np.float32)[..., np.newaxis]
    expected = np.clip(np.rint(weights.reshape(3, 2, 8) / scales), -7, 7)
    np.testing.assert_array_equal(codes, expected)


def on_grid(name, group, rng):
    """Codes, scales and weights of a matrix; few of the codes are the last."""
    scheme = dataclasses.replace(SCHEMES[name], group=group)
    codes = rng.integers(-3, 4, (4, 16)).astype(np.float32)
    scales = rng.uniform(0.01, 0.1, (4, scheme.num_groups(16))).astype(np.float32)
    repeated = np.repeat(scales, 16 // scales.shape[1], 1)
    return scheme, codes, scales, repeated, codes * repeated


@pytest.mark.parametrize(("name", "group"), [("w4a16", 8), ("w8a8", 0), ("fp8", 0)])
def test_given_scales_recover_the_codes(name, group):
    """Fails if the scales are computed again: no weight has the last code."""
    rng = np.random.default_rng(3)
    scheme, codes, scales, repeated, weights = on_grid(name, group, rng)
    for dtype in (np.float32, jnp.bfloat16):
        source, given = source_of(w=weights.astype(dtype)), source_of(w=repeated)
        found = read(quantized.pack_source(source, ["w"], scheme, scales=given))
        stored = found[f"w{scheme.endings[0]}"]
        np.testing.assert_array_equal(scheme.restore(stored, 16), codes)
        np.testing.assert_array_equal(found["w_scale"], scales.astype(dtype))


def test_scales_that_do_not_fit_are_refused():
    rng = np.random.default_rng(4)
    scheme, _, _, repeated, weights = on_grid("w4a16", 8, rng)

    def error(weights, scales, text):
        plain, given = source_of(w=weights), source_of(w=scales)
        with checkpoint_error(text):
            read(quantized.pack_source(plain, ["w"], scheme, scales=given))

    several = repeated.copy()
    several[1, 5] *= 2
    error(
        *(weights, several),
        "tensor='w' has several scales in a group of 8 inputs; quantise it with a "
        "scale for each 8 inputs of an output",
    )
    error(
        *(weights, repeated * 1.3),
        "tensor='w' has weights that are no code times their scale; give the "
        "scales with which it was quantised, or none",
    )
    error(
        *(weights, repeated * 0),
        "tensor='w' has a scale that is not positive; quantise it again",
    )
    error(
        *(weights * np.nan, repeated),
        "tensor='w' is not finite everywhere; export another checkpoint",
    )
    with checkpoint_error("tensor='w' has no scales; give a scale for each weight"):
        source = source_of(w=weights)
        quantized.pack_source(source, ["w"], scheme, scales=source_of(v=weights))


NO_LINEAR = {
    "gpt2": (
        "transformer.h.0.attn.c_attn.weight",
        "leave out --quantize, or use --format=gguf",
    ),
    "gpt_oss": ("model.layers.0.mlp.experts.gate_up_proj", "use mxfp4"),
}
"""First tensor that no module of a scheme holds, and the remedy, by family."""


def golden_tensors(family):
    """Tensors of a golden checkpoint, with the model and the kind of its family."""
    folder = golden.FOLDER / family
    values = json.loads((folder / "config.json").read_text())
    model = from_mapping(schema.Model, golden.settings_of(family))
    return open_files(str(folder), folder), model, values["model_type"]


def write(folder, family, source, values, **changes):
    """Writes tensors beside a config.json with a quantisation, and other changes."""
    folder.mkdir()
    config = json.loads((golden.FOLDER / family / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | changes | {codes.KEY: values})
    )
    write_shards(folder, source, {"format": "pt"}, 1 << 30)


def arrays_of(family, folder):
    """Arrays of the built-in model that a directory gives."""
    config = golden.make_config(family, directory=folder)
    wanted = {huggingface.TOKENS: Entry((), "float32")}
    source = open_files(str(folder), folder)
    path = folder / "config.json"
    return read(
        huggingface.adapted(source, wanted, path, config.model, config.checkpoint)
    )


@pytest.fixture
def small_groups(monkeypatch):
    """Groups that divide the matrices of golden checkpoints, but for latents."""
    small = dataclasses.replace(SCHEMES["w4a16"], group=4)
    monkeypatch.setitem(SCHEMES, "w4a16", small)


LARGEST_ERRORS = {"w4a16": 0.51 / 7, "w8a8": 0.51 / 127, "fp8": 2**-4}
"""Errors of a weight over the largest weight of an array."""


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", [*golden.FAMILIES, *golden.ENCODERS])
def test_every_family_comes_back_or_is_refused(family, name, small_groups, tmp_path):
    """Fails if a matrix of a block stays plain, or anything else is rounded."""
    source, model, kind = golden_tensors(family)
    if family in NO_LINEAR:
        tensor, remedy = NO_LINEAR[family]
        with config_error(
            f"--quantize={name!r} has no layout for {tensor} of {kind}, which is no "
            f"Linear; {remedy}"
        ):
            quantized.compress(source, model, kind, name)
        return
    found, values = quantized.compress(source, model, kind, name)
    write(tmp_path / "out", family, found, values)
    expected = arrays_of(family, golden.FOLDER / family)
    back = arrays_of(family, tmp_path / "out")
    assert back.keys() == expected.keys()
    odd = {x for x in values["ignore"] if "proj" in x}
    for array, plain in expected.items():
        is_matrix = ".kernel" in array and array.startswith("blocks.")
        if is_matrix and ".router." not in array and not odd:
            error = np.abs(back[array] - plain).max() / np.abs(plain).max()
            assert 0 < error < LARGEST_ERRORS[name]
        elif not is_matrix or ".router." in array:
            np.testing.assert_array_equal(back[array], plain)


def test_widths_that_groups_do_not_divide_stay_plain_and_are_told(caplog, small_groups):
    family = "deepseek_v3"
    source, model, kind = golden_tensors(family)
    found, values = quantized.compress(source, model, kind, "w4a16")
    plain = [x for x in values["ignore"] if "proj" in x]
    assert plain
    for module in plain:
        assert source.entries[f"{module}.weight"].shape[1] % 4
        assert f"{module}.weight" in found.entries
    text = "\n".join(caplog.messages)
    assert "plain, as 4 does not divide their inputs: " + f"{plain[0]}.weight" in text


def test_no_width_that_groups_divide_is_refused():
    with config_error(
        "--quantize='w4a16' has groups of 128 inputs, which divide no matrix; use w8a8 "
        "or fp8"
    ):
        quantized.compress(*golden_tensors("llama"), "w4a16")


def test_slices_of_codes_are_slices_of_the_matrix(small_groups, tmp_path):
    """Fails if an odd first input, or a row, is read at another place."""
    source, model, kind = golden_tensors("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    for scheme in SCHEMES:
        found, values = quantized.compress(source, model, kind, scheme)
        plain = {name: source.entries[name]}
        opened = codes.find_quantized({codes.KEY: values}, plain, found)
        back = opened.dequantized(found)
        whole = back.read_all(name)
        for rows, inputs in itertools.product((0, 3), (0, 5, 8)):
            index = slice(rows, rows + 4), slice(inputs, inputs + 7)
            np.testing.assert_array_equal(back.read(name, index), whole[index])


def test_logits_are_near(tmp_path):
    """Fails if scales belong to other rows; random weights make errors large."""
    source, model, kind = golden_tensors("llama")
    write(tmp_path / "out", "llama", *quantized.compress(source, model, kind, "w8a8"))
    run = golden.start(golden.make_config("llama", directory=tmp_path / "out"))
    plain = golden.expected_of("llama")
    found = np.asarray(
        run.model.bind(run.state.master, {})(jnp.asarray(plain["tokens"]))
    )
    error = np.abs(found - plain["logits"]).max() / np.abs(plain["logits"]).max()
    assert 0 < error < 5e-2


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_have_a_closed_form(name, small_groups, tmp_path):
    """Of all tensors of a file; the header of a small file is not small."""
    source, model, kind = golden_tensors("llama")
    found, _ = quantized.compress(source, model, kind, name, dtype="bfloat16")
    total = sum(
        int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in found.entries.values()
    )
    scheme, expected = SCHEMES[name], 0
    for tensor, entry in source.entries.items():
        size = int(np.prod(entry.shape))
        if "layers" not in tensor or len(entry.shape) == 1:
            expected += 2 * size
            continue
        outputs, inputs = entry.shape
        expected += size * scheme.num_bits // 8
        expected += 2 * outputs * (inputs // scheme.group if scheme.group else 1)
        expected += 16 * scheme.is_packed  # the shape
    assert total == expected


def config_with(tmp_path, **changes):
    source, model, kind = golden_tensors("llama")
    found, values = quantized.compress(source, model, kind, "w8a8")
    weights = values["config_groups"]["group_0"]["weights"]
    for key, value in changes.items():
        (weights if key in weights else values)[key] = value
    write(tmp_path / "out", "llama", found, values)
    return tmp_path / "out"


REMEDY = "use a checkpoint of plain weights, such as one saved in bfloat16"


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"symmetric": False}, "config_groups.group_0.weights.symmetric", False),
        ({"actorder": "group"}, "config_groups.group_0.weights.actorder", "'group'"),
        (
            {"strategy": "tensor"},
            "config_groups.group_0.weights.strategy",
            "('tensor', None)",
        ),
        ({"num_bits": 3}, "format", "('int-quantized', 'int', 3)"),
        ({"config_groups": {}}, "config_groups", "{}"),
    ],
)
def test_codes_of_other_kinds_are_refused(changes, name, value, tmp_path):
    folder = config_with(tmp_path, **changes)
    with config_error(
        f"quantization_config.{name}={value} of {folder}/config.json is not supported: "
        f"zjax reads symmetric codes of one group of modules alone; {REMEDY}"
    ):
        golden.make_config("llama", directory=folder)


def test_another_shape_than_the_packed_one_is_refused(small_groups, tmp_path):
    source, model, kind = golden_tensors("llama")
    found, values = quantized.compress(source, model, kind, "w4a16")
    name = "model.layers.0.mlp.down_proj.weight_shape"

    def read_wrong(tensor, index):
        right = found.read(tensor, index)
        return right + 1 if tensor == name else right

    write(tmp_path / "out", "llama", Source(found.entries, read_wrong), values)
    with checkpoint_error(
        f"{name}=(17, 25) is not the (16, 24) of this model; use another checkpoint"
    ):
        arrays_of("llama", tmp_path / "out")


GOLDEN = golden.FOLDER.parent / "compressed_tensors.npz"
"""Made with the library of the format, in groups of 8."""


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("case", ["random", "outlier", "one_value", "narrow"])
def test_bits_are_those_of_the_library(case, name):
    """Fails if a bit of a code or of a scale is another one."""
    with np.load(GOLDEN) as file:
        expected = {
            key.rpartition("/")[2]: file[key]
            for key in file.files
            if key.startswith(f"{case}/{name}/")
        }
        weight = file[f"{case}/weight"]
    scheme = dataclasses.replace(SCHEMES[name], group=8 if name == "w4a16" else 0)
    found = quantized.pack_source(source_of(weight=weight), ["weight"], scheme)
    plain = expected.pop("plain")
    assert {*found.entries} == {*expected}
    for ending, stored in expected.items():
        ours = found.read_all(ending)
        ours = ours.view(stored.dtype) if stored.dtype == np.uint8 else ours
        np.testing.assert_array_equal(ours.reshape(stored.shape), stored)
    opened = codes.Quantized(codes.CompressedTensors(scheme), {"weight": weight.shape})
    np.testing.assert_array_equal(opened.dequantized(found).read_all("weight"), plain)
