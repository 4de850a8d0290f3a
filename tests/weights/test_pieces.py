"""Large arrays arrive piece by piece, and in any form of a run."""

import itertools
import os
import queue
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint import states
from zjax.checkpoint.start import load_weights
from zjax.ops.weights import low_bits
from zjax.weights import files as weights
from zjax.weights import layers as views
from zjax.weights import pieces
from zjax.weights.saved import place_slices
from zjax.weights.source import Entry, Source, cached

SHAPE = (6, 8, 10)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "_SMALL_BYTES", 0)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2 * 8 * 10 * 4)
    monkeypatch.setattr(pieces, "_SENT_BYTES", 200)
    monkeypatch.setattr(weights, "_PART_BYTES", 100)


def make_plan(shape, stage):
    params = {"x": np.zeros(shape, np.float32)}
    return states.make_rows(params, stage=stage)["x"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_pieces_of_any_memory_order_are_the_array(stage, order):
    """Fails if a piece is written to another place or not turned back."""
    rng = np.random.default_rng(0)
    turned = rng.standard_normal([SHAPE[i] for i in order]).astype(np.float16)
    array, plan = turned.transpose(np.argsort(order)), make_plan(SHAPE, stage)
    assert array.shape == SHAPE
    read = []

    def of(index):
        read.append(index)
        return array[index]

    (found,) = pieces.place_pieces([(of, plan)])
    sizes, expected = [x[0].stop - x[0].start for x in read], place_slices(of, plan)
    assert found.sharding == expected.sharding
    assert found.dtype == expected.dtype == np.float32
    for one, other in zip(
        found.addressable_shards, expected.addressable_shards, strict=True
    ):
        np.testing.assert_array_equal(one.data, other.data)
    if stage == 0:
        assert sizes == [2, 2, 2]


def test_pieces_are_sent_flat_in_parts(monkeypatch):
    """Fails if the host would transpose a piece, or sends it as a whole."""
    put, sent = jax.device_put, []

    def put_parts(parts, device):
        sent.extend(parts)
        return put(parts, device)

    monkeypatch.setattr(pieces, "_PIECE_BYTES", 1)
    monkeypatch.setattr(jax, "device_put", put_parts)
    array = np.arange(480, dtype=np.float32).reshape(6, 8, 10)
    plan = make_plan(array.shape, 0)

    def of_one_layer(index):
        return np.ascontiguousarray(array[index[0].start].T).T[np.newaxis]

    (found,) = pieces.place_pieces([(of_one_layer, plan)])
    np.testing.assert_array_equal(found, array)
    assert {(x.ndim, x.strides) for x in sent} == {(1, (4,))}
    assert {x.nbytes for x in sent} == {200, 80 * 4 - 200}


@pytest.mark.parametrize("stage", [0, 3])
def test_rows_that_are_too_large_are_read_in_parts(stage, monkeypatch):
    """As those of all experts of a layer; fails if a part is written elsewhere."""
    monkeypatch.setattr(pieces, "_MAX_ROW_BYTES", 8 * 10 * 4 - 1)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 3 * 10 * 4)
    array = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    plan, sizes = make_plan(SHAPE, stage), []

    def of(index):
        sizes.append(array[index].size)
        return array[index]

    (found,) = pieces.place_pieces([(of, plan)])
    np.testing.assert_array_equal(found, array)
    if stage == 0:
        assert sizes == [30, 30, 20] * 6


def test_arrays_are_read_ahead_as_far_as_there_is_memory(monkeypatch):
    """Fails if the next array waits for the one before, or if all are read at once."""
    monkeypatch.setattr(pieces, "_AHEAD_BYTES", 4 * 2 * 8 * 10 * 4)
    array, reads = np.ones(SHAPE, np.float32), queue.Queue()

    def reader(name):
        def of(index):
            reads.put((name, index[0].start))
            return array[index]

        return of

    plan = make_plan(SHAPE, 0)
    placed = pieces.place_pieces([(reader(name), plan) for name in "abc"])
    assert reads.empty()  # until the first is asked for
    next(placed)
    every = [(name, start) for name in "abc" for start in (0, 2, 4)]
    assert [reads.get(timeout=300) for _ in range(6)] == every[:6]
    with pytest.raises(queue.Empty):
        reads.get(timeout=0.2)
    placed.close()
    assert not [x for x in threading.enumerate() if x.name.startswith("read-ahead")]


HALFWAY = """
import numpy as np
from tests.checkpoint import states
from zjax.weights import pieces

array = np.ones((6, 8), np.float32)
plan = states.make_rows({"x": array}, stage=0)["x"]
placed = pieces.place_pieces([(array.__getitem__, plan)] * 2)
next(placed)
"""


def test_a_loading_left_halfway_ends_with_the_interpreter():
    """Fails if a generator looks for modules that are gone, and says so."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", HALFWAY]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr


def test_processes_read_no_array_before_it_is_asked_for(monkeypatch):
    """Their reads and programs may wait for each other, in an order of their own."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    array, plan, read = np.ones(SHAPE, np.float32), make_plan(SHAPE, 0), []

    def reader(name):
        return lambda index: read.append(name) or array[index]

    placed = pieces.place_pieces([(reader(name), plan) for name in "ab"])
    next(placed)
    assert read == ["a"] * 3
    assert len([*placed]) == 1 and read == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_is_read_ahead_holds_no_more_than_its_bytes(order):
    """Fails if a slice of columns keeps the rows, or a cached array, that it is of."""
    turned = np.arange(480, dtype=np.float32).reshape([SHAPE[i] for i in order])
    array = turned.transpose(np.argsort(order))
    index = (slice(0, 2), slice(2, 4), slice(0, 10))
    ((found, piece),) = pieces._read_ahead([(array.__getitem__, index)])
    assert found == index and not np.shares_memory(piece, turned)
    np.testing.assert_array_equal(piece, array[index])
    assert np.argsort(piece.strides).tolist() == np.argsort(array.strides).tolist()
    whole = np.ones(SHAPE, np.float32)
    ((_, piece),) = pieces._read_ahead([(whole.__getitem__, (slice(0, 6),))])
    assert np.shares_memory(piece, whole)


def test_an_error_of_a_read_comes_with_its_array():
    plan, array = make_plan(SHAPE, 0), np.ones(SHAPE, np.float32)

    def fail(_):
        raise OSError("gone")

    placed = pieces.place_pieces([(array.__getitem__, plan), (fail, plan)])
    np.testing.assert_array_equal(next(placed), array)
    with pytest.raises(OSError, match="gone"):
        next(placed)


def test_a_tensor_is_read_by_several_threads_in_parts(tmp_path):
    params = states.make_params(width=6)
    rows = states.make_rows(params, stage=3)
    path = str(tmp_path / "x.safetensors")
    named = {k: np.asarray(v) for k, v in params.items() if isinstance(v, np.ndarray)}
    safetensors.numpy.save_file(named, path)
    assert named
    found = load_weights(path, {name: rows[name] for name in named})
    states.assert_same(found, named, {name: rows[name] for name in named})


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": np.ones(500, np.float32)}, path)
    file = weights.TensorFile(path)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(OSError, match="ended while it was read"):
        file.read("x", (slice(0, 500),))


LAYERS, WIDTH, HIDDEN = 3, 4, 12
SHAPES = {
    "norm/scale": (LAYERS, WIDTH),
    "mlp/up/kernel": (LAYERS, WIDTH, HIDDEN),
    "mlp/up/bias": (LAYERS, HIDDEN),
    "mlp/down/kernel": (LAYERS, HIDDEN, WIDTH),
    "mlp/down/bias": (LAYERS, WIDTH),
}
HIDDEN_DIMS = {"mlp/up/kernel": 2, "mlp/up/bias": 1, "mlp/down/kernel": 1}
FORMS = list(itertools.product([1, 2, 3], ["stacked", "apart"]))


def make_arrays():
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}


def stored(num_tiles, layers):
    """What a run of this form stores."""
    found = {}
    for name, x in make_arrays().items():
        if name in HIDDEN_DIMS and num_tiles > 1:
            for i, tile in enumerate(np.split(x, num_tiles, HIDDEN_DIMS[name])):
                found[name.replace("mlp/", f"mlp/tiles/{i}/")] = tile
        else:
            found[name] = x
    if layers == "apart":
        return {f"{n}[{i}]": x[i] for n, x in found.items() for i in range(LAYERS)}
    return found


def entries_of(arrays):
    return {name: Entry(x.shape, str(x.dtype)) for name, x in arrays.items()}


def source_of(arrays, read=None):
    return Source(entries_of(arrays), read or (lambda name, index: arrays[name][index]))


@pytest.mark.parametrize("wanted", FORMS, ids=str)
@pytest.mark.parametrize("given", FORMS, ids=str)
def test_arrays_of_each_form_are_seen_in_any_other(given, wanted):
    """Fails if a tile or a layer is read from the place of another."""
    expected = stored(*wanted)
    found = views.match_layout(source_of(stored(*given)), entries_of(expected))
    assert found.entries == entries_of(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found.read_all(name), x, err_msg=name)
        index = tuple(slice(n // 3, n) for n in x.shape)
        np.testing.assert_array_equal(found.read(name, index), x[index], err_msg=name)


def test_no_more_is_read_than_is_asked_for():
    """Fails if a device that needs a slice of a tile has the whole array read."""
    arrays, reads = stored(1, "stacked"), []

    def read(name, index):
        part = arrays[name][index]
        reads.append((name, part.size))
        return part

    wanted = entries_of(stored(3, "apart"))
    found = views.match_layout(source_of(arrays, read), wanted)
    found.read("mlp/tiles/2/up/kernel[1]", (slice(0, 2), slice(1, 3)))
    assert reads == [("mlp/up/kernel", 4)]


def test_split_master_weights_are_whole_beneath_other_views():
    """Fails if low bits are cut into tiles beside high bits that are not."""
    whole = {f"master/{name}": x for name, x in make_arrays().items()}
    low = {name: low_bits(x) for name, x in whole.items()}
    high = {
        name.replace("master/", "params/"): x.astype(jnp.bfloat16)
        for name, x in whole.items()
    }
    found = views.join_masters(source_of(low | high))
    names = {f"master/{n}": x for n, x in stored(2, "apart").items()}
    found = views.match_layout(found, entries_of(names))
    assert found.entries == entries_of(names)
    for name, x in names.items():
        np.testing.assert_array_equal(found.read_all(name), x, err_msg=name)


def test_a_cached_source_is_read_once_for_all_parts_of_an_array():
    arrays, reads = stored(1, "stacked"), []

    def read(name, index):
        reads.append(name)
        return arrays[name][index]

    source = cached(source_of(arrays, read))
    found = views.match_layout(source, entries_of(stored(2, "apart")))
    for layer, tile in itertools.product(range(LAYERS), range(2)):
        found.read_all(f"mlp/tiles/{tile}/up/kernel[{layer}]")
    assert reads == ["mlp/up/kernel"]
