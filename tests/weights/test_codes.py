"""Quantised checkpoints start a run with the values that their codes mean."""

import json
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.support import huggingface as golden
from tests.support import quantized
from zjax.checkpoint import start as weights
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, ConfigError
from zjax.huggingface import model_settings
from zjax.run.saving import save
from zjax.sharding import plan as plans
from zjax.weights.codes import Fp8, Mxfp4

SHARDED = "zero.stage=3", "zero.min_shard_elements=8", "mesh.expert=2", "mesh.tensor=2"
NAN_SCALE, MAX_SCALE = 255, 254


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def reader(array, read):
    """Reads slices of an array, inside of it, and counts the elements."""

    def read_slice(index):
        for span, size in zip(index, array.shape, strict=True):
            assert 0 <= span.start <= span.stop <= size
        found = array[index]
        read.append(found.size)
        return found

    return read_slice


def read_plain(form, stored, index, counts=([], [])):
    return form.read(index, *map(reader, stored, counts))


def test_every_code_and_scale_of_mxfp4():
    """Each half of a byte, of the smallest scale to the largest, and of NaN."""
    scales = np.arange(256, dtype=np.uint8)[None, :, None].repeat(16, 2)
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, 1)
    expected = quantized.plain_mxfp4(blocks, scales)
    found = read_plain(Mxfp4(), (blocks, scales), whole(expected.shape))
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), expected)
    np.testing.assert_array_equal(
        np.signbit(found[..., :255]), np.signbit(expected)[..., :255]
    )
    is_nan, is_infinite = np.isnan(expected), np.isinf(expected)
    assert is_nan[..., NAN_SCALE].all() and not is_nan[..., :NAN_SCALE].any()
    assert is_infinite[..., MAX_SCALE].any() and not is_infinite[..., :253].any()
    assert np.abs(expected[np.abs(expected) > 0]).min() == 2.0**-128


def test_every_code_of_fp8():
    """Under scales of all kinds, zero, infinity and NaN among them."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, -1)
    codes = codes.view(ml_dtypes.float8_e4m3fn).repeat(9, 0)
    factors = [0.0, 1.0, -2.0, 1e-45, 3e-39, 1 / 3, 1e38, np.inf, np.nan]
    scales = np.array(factors, np.float32)[:, None]
    expected = quantized.plain_fp8(codes, scales, (1, 256))
    with np.errstate(over="ignore", invalid="ignore"):
        found = read_plain(Fp8((1, 256)), (codes, scales), whole(codes.shape))
    assert found.dtype == np.float32 and np.isnan(expected[1]).sum() == 2
    np.testing.assert_array_equal(found, expected)


def test_scales_of_fp8_may_have_16_bits():
    codes, scales = quantized.random_fp8((5, 7), (2, 4), np.random.default_rng(1))
    stored = codes, scales.astype(ml_dtypes.bfloat16)
    found = read_plain(Fp8((2, 4)), stored, whole(codes.shape))
    np.testing.assert_array_equal(found, quantized.plain_fp8(*stored, (2, 4)))


@pytest.mark.parametrize("shape", [(130, 300), (256, 128), (5, 129), (300, 7)])
def test_blocks_at_the_edges_of_fp8_have_less(shape):
    """Slices read the blocks that they touch alone, and are those of the whole."""
    rng = np.random.default_rng(1)
    stored = quantized.random_fp8(shape, (128, 128), rng)
    expected = quantized.plain_fp8(*stored, (128, 128))
    for index in (whole(shape), *random_slices(shape, rng)):
        counts = [], []
        found = read_plain(Fp8(), stored, index, counts)
        np.testing.assert_array_equal(found, expected[index])
        assert counts[0] == [found.size]
        if found.size:
            assert counts[1] == [np.prod([num_blocks(x, 128) for x in index])]


@pytest.mark.parametrize("num_inputs", [96, 40])
def test_slices_of_mxfp4_are_those_of_the_whole(num_inputs):
    rng = np.random.default_rng(1)
    shape = 3, num_inputs, 10
    stored = quantized.random_mxfp4(shape, rng)
    expected = quantized.plain_mxfp4(*stored)[:, :num_inputs]
    for index in (whole(shape), *random_slices(shape, rng)):
        counts = [], []
        found = read_plain(Mxfp4(), stored, index, counts)
        np.testing.assert_array_equal(found.astype(np.float32), expected[index])
        assert counts[0] == [16 * counts[1][0]]
        if found.size:
            rows = len(found) * found.shape[2]
            assert counts[1] == [rows * num_blocks(index[1], 32)]


@pytest.mark.parametrize("form", [Fp8(), Mxfp4()], ids=["fp8", "mxfp4"])
def test_values_take_little_more_than_their_own_memory(form):
    """Fails if whole arrays of indices or factors are beside the values."""
    shape = (2, 512, 2048)
    stored = [np.zeros(x.shape, x.dtype) for x in form.entries(shape)]
    form.read(whole((1, 1, 1)), *(x.__getitem__ for x in stored))  # makes its table
    tracemalloc.start()
    found = form.read(whole(shape), *(x.__getitem__ for x in stored))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == shape and peak < found.nbytes + 16 * 2**17 + 2**19


def num_blocks(span, size):
    return (span.stop - 1) // size - span.start // size + 1


def random_slices(shape, rng, number=40):
    """Slices of an array, of which some are empty."""
    for _ in range(number):
        bounds = [sorted(rng.integers(0, n + 1, 2)) for n in shape]
        yield tuple(slice(*map(int, pair)) for pair in bounds)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of a quantised and a plain checkpoint, and the stored tensors."""
    found = {}
    for method, write in (
        ("fp8", quantized.write_fp8),
        ("mxfp4", quantized.write_mxfp4),
    ):
        place = tmp_path_factory.mktemp(method)
        stored, plain = place / "stored", place / "plain"
        found[method] = stored, plain, write(stored, plain)
    return found


FAMILIES = {"fp8": "deepseek_v3", "mxfp4": "gpt_oss"}


def start(method, folder, *overrides, num_devices=1):
    config = golden.make_config(FAMILIES[method], *overrides, directory=folder)
    return golden.start(config, num_devices)


def assert_same_weights(run, other):
    """All master weights are equal, bit for bit."""
    pairs = zip(
        *(jax.tree.leaves_with_path(x.state.master) for x in (run, other)), strict=True
    )
    for (path, mine), (_, theirs) in pairs:
        np.testing.assert_array_equal(mine, theirs, jax.tree_util.keystr(path))


@pytest.mark.parametrize("method", FAMILIES)
def test_a_run_starts_with_what_the_codes_mean(method, folders, caplog):
    """Fails if an array has the codes or scales of another, and if no log says so."""
    stored, plain, tensors = folders[method]
    expected = start(method, plain)
    caplog.clear()
    run = start(method, stored)
    endings = "_scale_inv", "_scales"
    number = sum(name.endswith(endings) for name in tensors)
    assert number == {"fp8": 72, "mxfp4": 4}[method]
    assert caplog.messages[-1] == (
        f"checkpoint.init_from='{stored}' has {number} tensors in {method}, which are "
        "dequantised while they are read: the run, its checkpoints and exports are "
        "plain"
    )
    assert_same_weights(run, expected)


@pytest.mark.parametrize("method", FAMILIES)
def test_each_device_reads_its_part(method, folders, monkeypatch):
    """Fails if a slice has the scales of another, or a device reads all experts."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    stored, plain, _ = folders[method]
    expected = start(method, plain, *SHARDED, num_devices=8)
    entries = weights.open_source(str(stored)).entries
    sizes = golden.record_reads(monkeypatch)
    run = start(method, stored, *SHARDED, num_devices=8)
    assert_same_weights(run, expected)
    codes = [n for n in sizes if n.endswith(("_blocks", "down_proj.weight"))]
    assert codes
    for name in codes:
        assert max(sizes[name]) <= np.prod(entries[name].shape) // 2, name


def test_exports_are_plain(folders, tmp_path):
    """The config.json has no quantisation, and all tensors are of the dtype asked."""
    stored, *_ = folders["mxfp4"]
    run = start("mxfp4", stored)
    save(tmp_path / "run", run.state, run)
    folder = tmp_path / "out"
    export_huggingface(Store(str(tmp_path / "run")), str(folder), dtype="bfloat16")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    entries = weights.open_source(str(folder)).entries
    assert {entry.dtype for entry in entries.values()} == {"bfloat16"}
    experts = "blocks", "layer0", "mlp", "experts", "up", "kernel"
    weights_of = [x.state.master for x in (run, start("mxfp4", folder))]
    for name in experts:
        weights_of = [x[name] for x in weights_of]
    np.testing.assert_array_equal(*weights_of)  # exact in bfloat16


def refusal(method, folders, tmp_path, change):
    """The refusal of stored tensors that `change` changed."""
    stored, _, tensors = folders[method]
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    tensors = dict(tensors)
    change(tensors)
    quantized.write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as error:
        start(method, tmp_path)
    return str(error.value).replace(str(tmp_path), "DIR").splitlines()[:-1]


def test_scales_of_fp8_that_are_wrong_are_named(folders, tmp_path):
    """Missing ones, those of another shape, and those of a plain tensor."""
    names = [f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")]

    def change(tensors):
        first, second = (f"{name}_scale_inv" for name in names[:2])
        del tensors[first]
        tensors[second] = tensors[second][:, :-1]
        tensors[names[2]] = np.zeros((16, 24), ml_dtypes.bfloat16)

    assert refusal("fp8", folders, tmp_path, change) == [
        f"{names[0]}_scale_inv='float32[6,6]' is missing from DIR; did you mean "
        f"{names[2]}_scale_inv?",
        f"{names[1]}_scale_inv='float32[6,6]' is float32[6,5] in DIR; make the two "
        "agree",
        f"{names[2]}_scale_inv='float32[4,8]' is in DIR but not in this model; remove "
        "it from the checkpoint, or add it to the model",
    ]


def test_scales_of_mxfp4_that_are_wrong_are_named(folders, tmp_path):
    up, down = (f"model.layers.1.mlp.experts.{x}_proj" for x in ("gate_up", "down"))

    def change(tensors):
        del tensors[f"{up}_scales"]
        tensors[f"{down}_scales"] = tensors[f"{down}_scales"].astype(np.float32)
        tensors[f"{down}_blocks"] = tensors[f"{down}_blocks"][..., :15]
        del tensors[f"{down.replace('1', '0')}_blocks"]
        tensors["model.norm.weight_blocks"] = np.zeros(2, np.uint8)

    other = down.replace("1", "0")
    add = "add it to the checkpoint, or remove it from the model"
    assert refusal("mxfp4", folders, tmp_path, change) == [
        f"{up}_scales='uint8[4,192,2]' is missing from DIR; {add}",
        f"{other}_blocks='uint8[4,64,3,16]' is missing from DIR; {add}",
        f"{down}_blocks='uint8[4,64,3,16]' is uint8[4,64,3,15] in DIR; make the two "
        "agree",
        f"{down}_scales='uint8[4,64,3]' is float32[4,64,3] in DIR; make the two agree",
        "model.norm.weight_blocks='uint8[2]' is in DIR but not in this model; remove "
        "it from the checkpoint, or add it to the model",
    ]


REMEDY = "use a checkpoint of plain weights, such as one saved in bfloat16"


def unread(key, value, what):
    return (
        f"quantization_config.{key}={value!r} of DIR/config.json is not supported: "
        f"zjax reads {what} alone; {REMEDY}"
    )


METHODS = "mxfp4, fp8 and compressed-tensors"


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        *(
            ({"quant_method": x, "bits": 4}, [unread("quant_method", x, METHODS)])
            for x in ("gptq", "awq", "bitsandbytes", ["fp8"])
        ),
        ({"load_in_4bit": True}, [unread("quant_method", None, METHODS)]),
        (
            "fp8",
            [
                "quantization_config='fp8' of DIR/config.json is not an object; "
                "correct it there"
            ],
        ),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": None,
                "activation_scheme": "static",
                "fmt": "e5m2",
                "scale_fmt": "int8",
                "expert_dtype": "fp4",
            },
            [
                unread("activation_scheme", "static", "'dynamic'"),
                unread("fmt", "e5m2", "'e4m3'"),
                unread("scale_fmt", "int8", "'float' or 'ue8m0' or None"),
                unread("expert_dtype", "fp4", "'fp8'"),
                unread("weight_block_size", None, "two sizes"),
            ],
        ),
        *(
            (
                {"quant_method": "fp8", "weight_block_size": x},
                [unread("weight_block_size", x, "two sizes")],
            )
            for x in ([128], [128, 0], [128, 64.0], [True, 1], "ab", [1, 1, 128])
        ),
    ],
)
def test_what_is_not_read_is_refused(given, lines, tmp_path):
    golden.copy("llama", tmp_path, quantization_config=given)
    with pytest.raises(ConfigError) as error:
        model_settings(tmp_path)
    assert str(error.value).replace(str(tmp_path), "DIR").splitlines() == lines


def test_unknown_keys_are_logged(tmp_path, caplog):
    given = {"quant_method": "fp8", "ignored_layers": ["lm_head"], "rounding": "up"}
    golden.copy("llama", tmp_path, quantization_config=given)
    model_settings(tmp_path)
    assert caplog.messages == [
        f"{tmp_path / 'config.json'}: unknown and not read: "
        "quantization_config.rounding='up'"
    ]


def test_a_plain_checkpoint_says_nothing(tmp_path, caplog):
    golden.copy("llama", tmp_path, quantization_config={"quant_method": "fp8"})
    golden.start(golden.make_config("llama", directory=tmp_path))
    assert "dequantised" not in caplog.text
