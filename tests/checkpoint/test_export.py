"""Weights go out to safetensors and come back onto any mesh."""

import json
import weakref

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint import states
from tests.support.refusals import checkpoint_error, config_error
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.start import load_weights
from zjax.errors import CheckpointError
from zjax.weights import files
from zjax.weights.saved import SavedArrays
from zjax.weights.source import Entry, Source

PARAMS = states.make_params()
FLAT = {
    "embed": PARAMS["embed"],
    "blocks.0.kernel": PARAMS["blocks"][0]["kernel"],
    "frozen": PARAMS["frozen"],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A checkpoint of 8 devices with a frozen array and one of no elements."""
    values = {"master": PARAMS | {"none": np.zeros((0, 3), np.float32)}}
    values["ema"] = {"embed": PARAMS["embed"] + 1}
    values["opt_state"] = {"embed": PARAMS["embed"] * 2}
    return states.save(tmp_path_factory.mktemp("store"), values, 1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """All of `PARAMS` in one file, written by the safetensors library."""
    path = tmp_path_factory.mktemp("exported") / "model.safetensors"
    safetensors.numpy.save_file(FLAT, path)
    return path


def test_export_holds_every_array_whole(store, tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    size = export_safetensors(store, str(path), part="raw")
    tensors = safetensors.numpy.load_file(path)
    assert tensors.keys() == {*FLAT, "none"}
    for name, value in FLAT.items():
        np.testing.assert_array_equal(tensors[name], value)
        assert tensors[name].dtype == value.dtype
    assert tensors["none"].shape == (0, 3)
    assert size == path.stat().st_size
    assert [*path.parent.iterdir()] == [path]


def test_export_casts_floating_point_only(store, tmp_path):
    path = tmp_path / "model.safetensors"
    export_safetensors(store, str(path), dtype="bfloat16", part="raw")
    tensors = safetensors.numpy.load_file(path)
    assert tensors["embed"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensors["embed"], FLAT["embed"].astype(jnp.bfloat16))
    assert tensors["frozen"].dtype == np.int32


@pytest.mark.parametrize("part", [{}, {"part": "ema", "step": 1}])
def test_averaged_weights_are_exported_where_they_are_kept(store, tmp_path, part):
    path = tmp_path / "auto.safetensors"
    export_safetensors(store, str(path), **part)
    tensors = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(tensors["embed"], PARAMS["embed"] + 1)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "flax", "part": "ema", "step": "1"}


def test_export_holds_one_tensor_at_a_time(store, tmp_path, monkeypatch):
    """Fails if arrays are collected before they are written."""
    alive, most = [], 0
    read = SavedArrays.read

    def read_and_count(self, name):
        nonlocal most
        array = read(self, name)
        alive.append(weakref.ref(array))
        most = max(most, sum(ref() is not None for ref in alive))
        return array

    monkeypatch.setattr(SavedArrays, "read", read_and_count)
    export_safetensors(store, str(tmp_path / "model.safetensors"), part="raw")
    assert len(alive) == len(FLAT)  # an array of no elements is not read
    assert most <= 2


def test_large_arrays_are_written_slice_by_slice(tmp_path, monkeypatch):
    """Fails if a cast array, or all layers of a stack, must fit memory at once."""
    monkeypatch.setattr(files, "_SLICE_BYTES", 3 * 4 * 2)
    arrays = {
        "stack": np.arange(5 * 4 * 2, dtype=np.float32).reshape(5, 4, 2),
        "long row": np.arange(2 * 20, dtype=np.float32).reshape(2, 20),
        "scalar": np.float32(3.0),
    }
    entries = {name: Entry(x.shape, "float32") for name, x in arrays.items()}
    sizes = []

    def read(name, index):
        found = arrays[name][index]
        sizes.append((name, found.size))
        return found

    path = tmp_path / "model.safetensors"
    files.write_file(path, files.cast(Source(entries, read), "float16"), {})
    assert sizes == [
        *[("stack", 8)] * 5,
        *[("long row", 20)] * 2,
        ("scalar", 1),
    ]
    found = safetensors.numpy.load_file(path)
    for name, x in arrays.items():
        np.testing.assert_array_equal(found[name], x.astype(np.float16))


def test_export_of_no_such_part_or_where_nothing_can_be_written(store, tmp_path):
    with config_error(
        "part='schedule_free' is not kept in this run; use auto, or one of ema, raw"
    ):
        export_safetensors(store, str(tmp_path / "x"), part="schedule_free")
    (tmp_path / "file").write_text("")
    path = f"{tmp_path}/file/model.safetensors"
    with checkpoint_error(
        f"output='{path}' cannot be written (File exists); name a file in a writable "
        "directory with free space"
    ):
        export_safetensors(store, path, part="raw")


def test_export_names_what_does_not_fit(tmp_path):
    values = {
        "master": {
            "a": {"b": np.zeros(2, np.float32)},
            "a.b": np.zeros(2, np.float32),
            "small": jnp.zeros(2, jnp.int4),
        }
    }
    store = states.save(tmp_path, values, 1, num_devices=1)
    with checkpoint_error(
        "a.b='float32[2]' has the same name in safetensors as a/b; rename one of them\n"
        "small='int4' is not a dtype of safetensors; export one of float64, float32, "
        "float16, bfloat16, int64, int32, int16, int8, uint8, uint16, uint32, uint64, "
        "bool, float8_e4m3fn, float8_e5m2"
    ):
        export_safetensors(store, str(tmp_path / "x"))


@pytest.mark.parametrize("target", [{}, {"num_devices": 1}, {"memory": "pinned_host"}])
def test_load_puts_slices_on_their_shards(exported, target):
    rows = states.make_rows(PARAMS, stage=3, **target)
    states.assert_same(load_weights(str(exported), rows), PARAMS, rows)


def test_load_casts_to_the_plan(exported):
    halved = PARAMS | {"embed": PARAMS["embed"].astype(jnp.bfloat16)}
    rows = states.make_rows(halved)
    states.assert_same(load_weights(str(exported.parent), rows), halved, rows)


def test_what_is_exported_can_be_loaded(store, tmp_path):
    path = tmp_path / "model.safetensors"
    export_safetensors(store, str(path), part="raw")
    values = PARAMS | {"none": np.zeros((0, 3), np.float32)}
    rows = states.make_rows(values)
    states.assert_same(load_weights(str(path), rows), values, rows)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 10**5,
        '{"weight_map": []}',
        '{"weight_map": {"up": "/dev/zero"}}',
        '{"weight_map": {"up": "."}}',
        '{"weight_map": {"up": "\\u0000"}}',
        json.dumps({"weight_map": {"up": "x" * 5000}}),
    ],
)
def test_a_hostile_index_is_refused_at_once(content, tmp_path):
    """Fails if a device is read for ever, or an error of Python's own comes out."""
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=REMEDY):
        load_weights(str(tmp_path), {})


def write_shards(directory, weight_map):
    for file in sorted({*weight_map.values()}):
        names = [name for name, place in weight_map.items() if place == file]
        tensors = {name: FLAT[name] for name in names if name in FLAT}
        safetensors.numpy.save_file(tensors, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


WEIGHT_MAP = {
    "embed": "model-00001-of-00002.safetensors",
    "blocks.0.kernel": "model-00002-of-00002.safetensors",
    "frozen": "model-00001-of-00002.safetensors",
}


def test_each_file_of_a_directory_of_shards_is_opened_once(tmp_path, monkeypatch):
    """Fails if a file is opened again for each slice that a device needs."""
    write_shards(tmp_path, WEIGHT_MAP)
    opened, safe_open = [], safetensors.safe_open

    def counted(path, **options):
        opened.append(path.name)
        return safe_open(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    rows = states.make_rows(PARAMS, stage=3)
    states.assert_same(load_weights(str(tmp_path), rows), PARAMS, rows)
    assert sorted(opened) == sorted({*WEIGHT_MAP.values()})


def test_load_of_another_model_names_what_differs(exported):
    other = states.make_params(width=8)
    other["embeds"] = other.pop("embed")
    other["frozen"] = other["frozen"].astype(np.float32)
    with checkpoint_error(
        f"blocks.0.kernel='float32[16,8]' is float32[16,6] in {exported}; make the two "
        "agree\n"
        f"embeds='float32[7,3]' is missing from {exported}; did you mean embed?\n"
        f"frozen='float32[5]' is int32[5] in {exported}; make the two agree\n"
        f"embed='float32[7,3]' is in {exported} but not in this model; remove it from "
        "the checkpoint, or add it to the model\n"
        f"checkpoint='{exported}' differs from this model in 4 arrays, 4 of them "
        "shown; use the configuration that wrote it, or another checkpoint"
    ):
        load_weights(str(exported), states.make_rows(other))


REMEDY = (
    "give a .safetensors file, a directory with one or with an index, or the directory "
    "of a run"
)


def test_load_of_what_is_not_there(tmp_path):
    with checkpoint_error(
        f"checkpoint.init_from='{tmp_path}/none' does not exist; {REMEDY}"
    ):
        load_weights(f"{tmp_path}/none", {})
    with checkpoint_error(
        f"checkpoint.init_from='/dev/zero' is not a regular file; {REMEDY}"
    ):
        load_weights("/dev/zero", {})
    with checkpoint_error(
        f"checkpoint.init_from='{tmp_path}' holds 0 safetensors files and 0 indices; "
        f"{REMEDY}"
    ):
        load_weights(str(tmp_path), {})


@pytest.mark.parametrize("keep", [0, 7, 60, -1], ids=lambda keep: f"{keep}-bytes")
def test_load_of_a_truncated_file(exported, tmp_path, keep):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(exported.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as error:
        load_weights(str(path), {})
    start, _, end = str(error.value).partition(" (")
    assert start == f"checkpoint.init_from='{path}' is not a readable safetensors file"
    assert end.endswith(f"; {REMEDY}")


def test_load_of_an_index_that_is_broken_or_leads_elsewhere(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with checkpoint_error(
        f"checkpoint.init_from='{index}' is not an index of safetensors (KeyError: "
        f"'weight_map'); {REMEDY}"
    ):
        load_weights(str(tmp_path), {})
    for file in ("../other/model.safetensors", "/model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"head": file}}))
        with checkpoint_error(
            f"checkpoint.init_from='{index}' names {file} for head, which is "
            f"elsewhere; {REMEDY}"
        ):
            load_weights(str(tmp_path), {})


def test_load_of_an_index_that_promises_more(tmp_path):
    first = "model-00001-of-00002.safetensors"
    write_shards(tmp_path, WEIGHT_MAP | {"head": first})
    index = tmp_path / "model.safetensors.index.json"
    with checkpoint_error(
        f"checkpoint.init_from='{index}' names head, which {tmp_path / first} lacks; "
        f"{REMEDY}"
    ):
        load_weights(str(tmp_path), states.make_rows(PARAMS))
