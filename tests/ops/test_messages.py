"""Several arrays in one message, against what each device has, in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zjax.ops import packed

DTYPES = ("uint8", "float32", "int8", "bfloat16", "bool", "int32", "float16", "uint16")
SHAPES = {"scalar": (), "empty": (0, 3), "vector": (8,), "matrix": (4, 6)}
GRID = {"node": 2, "local": 4}


def make_tree(device, dtypes, shapes):
    """Arrays of one device, whose bytes differ from those of others."""
    rng = np.random.default_rng(device)
    return {
        f"{dtype}_{shape}": jnp.asarray(100 * rng.normal(size=shape)).astype(dtype)
        for dtype in dtypes
        for shape in shapes
    }


def on_devices(run, trees, mesh):
    """What each device of a mesh returns for its own arrays."""

    def of_device(tree):
        result = run(jax.tree.map(lambda x: x[0], tree))
        return jax.tree.map(lambda x: x[None], result)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *trees)
    spec = P(mesh.axis_names)
    mapped = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec))
    text = mapped.lower(stacked).as_text()
    return text, jax.tree.map(np.asarray, mapped(stacked))


def assert_equal(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axes", [("node", "local"), ("local", "node"), "local"])
def test_gathered_arrays_are_those_of_all_devices(axes):
    """Arrays of all dtypes, without elements and without dims, major axis first."""
    mesh = Mesh(np.array(jax.devices()).reshape(*GRID.values()), tuple(GRID))
    trees = [make_tree(i, DTYPES, SHAPES.values()) for i in range(8)]
    gather = functools.partial(packed.all_gather, axes=axes)
    text, found = on_devices(gather, trees, mesh)
    assert text.count("stablehlo.all_gather") == 1
    numbers = np.arange(8).reshape(2, 4)
    for device in range(8):
        if axes == "local":
            order = numbers[device // 4]
        else:
            order = numbers.transpose([tuple(GRID).index(axis) for axis in axes])
        for name in trees[0]:
            parts = [np.asarray(trees[i][name]) for i in order.ravel()]
            assert_equal(found[name][device], np.stack(parts))


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[1:2]], ids=["several", "one"])
def test_each_device_receives_its_chunk_of_every_array(dtypes):
    """The chunks of an array are its elements in their order, whatever its shape."""
    mesh = Mesh(jax.devices()[:4], "i")
    names = ("empty", "vector", "matrix") if len(dtypes) > 1 else ("matrix",)
    shapes = [SHAPES[name] for name in names]
    trees = [make_tree(i, dtypes, shapes) for i in range(4)]
    exchange = functools.partial(packed.exchange_chunks, axis="i")
    text, found = on_devices(exchange, trees, mesh)
    assert text.count("stablehlo.all_to_all") == 1
    for device in range(4):
        for name in trees[0]:
            flat = [np.asarray(tree[name]).reshape(4, -1) for tree in trees]
            expected = np.stack([chunks[device] for chunks in flat])
            assert_equal(found[name][device], expected)


def test_numbers_that_are_not_finite_arrive_bit_for_bit():
    """Fails if bytes are read as numbers on the way."""
    mesh = Mesh(jax.devices()[:2], "i")
    words = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32)
    tree = {"mark": jnp.uint8(7), "x": jnp.asarray(words.view(np.float32))}
    gather = functools.partial(packed.all_gather, axes="i")
    _, found = on_devices(gather, [tree] * 2, mesh)
    np.testing.assert_array_equal(
        found["x"].view(np.uint32), np.broadcast_to(words, (2, 2, 4))
    )
