"""Collectives and compressed messages, against what each device has, in NumPy."""

import dataclasses
import functools
import math
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.reference.compression import Workers
from zjax.ops import packed, shards
from zjax.ops.codecs import make_codec
from zjax.ops.packed import Errors, compressed_mean, padded_size
from zjax.settings import choices, schema
from zjax.sharding import mesh as meshes

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_of_a_model_are_averaged_in_float32(dtype):
    """Fails if statistics of a BatchNorm are added in 16 bits.

    Asked of the program before it is compiled: the compiler for CPUs adds in float32
    whatever it is told, those for GPUs do not.
    """
    mesh = meshes.make_mesh(schema.Mesh())
    mean = functools.partial(shards.mean_over, axes=("data",))
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    x = np.random.default_rng(0).normal(1, 100, (8, 64)).astype(jnp.dtype(dtype))
    found = jax.jit(mapped)(x)
    assert found.dtype == x.dtype
    expected = x.astype(np.float64).mean(0, keepdims=True)
    rounding = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float64(found), expected, rtol=rounding, atol=1e-5)
    added = re.findall(r"(\w+)\[[\d,]*\] = psum\w*", str(jax.make_jaxpr(mapped)(x)))
    assert added == ["f32"]


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_counters_of_a_model_are_those_of_the_first_device(dtype):
    """Fails if what is counted in whole numbers is averaged, or differs by device."""
    mapped = jax.shard_map(
        lambda x: shards.mean_over(x[0], ("data",))[None],
        mesh=meshes.make_mesh(schema.Mesh()),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    x = jnp.array([3, *range(7)]).astype(dtype)
    found = jax.jit(mapped)(x)
    assert found.dtype == x.dtype
    assert found.tolist() == [x[0]] * 8


NODES, DEVICES = 2, 4
INT4, INT8 = packed.CODECS["int4"], packed.CODECS["int8"]
RANKS = NODES * DEVICES
SHAPE = (40, 1_000)
"""Of a term: a shard of 5,000 elements is no whole number of blocks."""


def mapped(run, in_specs, out_specs):
    mesh = meshes.make_mesh(schema.Mesh(replica=NODES, data=DEVICES))
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    )


def spec_of(dim):
    axes = "data", "replica"
    return P(axes, None) if dim == 0 else P(None, axes)


def quantise(x, codec):
    """A vector whose blocks are rounded to multiples of their scales, in float32."""
    levels = np.float32(2 ** (codec.bits - 1))
    blocks = np.pad(x, (0, -len(x) % codec.block)).reshape(-1, codec.block)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / levels
    scales[scales == 0] = 1
    codes = np.clip(np.rint(blocks * (1 / scales)), -levels, levels - 1)
    return (codes * scales).reshape(-1)[: len(x)]


SLOT = [p % DEVICES * NODES + p // DEVICES for p in range(RANKS)]
"""The shard of each rank."""


def emulate(terms):
    """The shard of the sum that each rank gets, for the shards of terms [rank, 8, n].

    Reference: steps 1 to 3 of qgZ, with the arrays of every rank by themselves.
    """
    inside = np.zeros((RANKS, NODES, terms.shape[2]), np.float32)
    for rank in range(RANKS):  # what it receives from the devices of its node
        node, device = divmod(rank, DEVICES)
        for target in range(NODES):
            shard = SLOT[target * DEVICES + device]
            for sender in range(node * DEVICES, (node + 1) * DEVICES):
                inside[rank, target] += quantise(terms[sender, shard], INT4)
    result = np.zeros((RANKS, terms.shape[2]), np.float32)
    for rank in range(RANKS):  # what it receives from the same device of each node
        node, device = divmod(rank, DEVICES)
        for other in range(NODES):
            result[rank] += quantise(inside[other * DEVICES + device, node], INT4)
    return result


def make_shards(size):
    """Shards of terms [rank, 8, size] whose sums are exact in any order.

    The largest number of each block is a power of two, so that codes times scales are.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RANKS, RANKS, size)).astype(np.float32)
    for start in range(0, size, INT4.block):
        block = x[..., start : start + INT4.block]
        powers = 2.0 ** rng.integers(-3, 4, (RANKS, RANKS, 1))
        block *= powers / np.abs(block).max(axis=2, keepdims=True)
        block[..., :1] = np.sign(block[..., :1]) * powers
    return x


def make_terms():
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.1, 10, (RANKS, 1, SHAPE[1]))
    return (columns * rng.normal(size=(RANKS, *SHAPE))).astype(np.float32)


@pytest.mark.parametrize("dim", [0, 1])
def test_reduction_equals_every_rank_by_hand(dim):
    """Fails for the scale of another chunk, a mean, or other hops."""
    assert [SLOT.index(shard) for shard in range(RANKS)] == [0, 4, 1, 5, 2, 6, 3, 7]
    axes = ("data", "replica")
    shape = [*SHAPE]
    shape[dim] //= RANKS

    def run(term):
        return packed.reduce_scatter_codes(term[0], axes, dim, INT4)

    shards = make_shards(np.prod(shape))
    by_shard = shards.swapaxes(0, 1).reshape(RANKS, RANKS, *shape)
    terms = np.concatenate(by_shard, axis=1 + dim)
    found = mapped(run, P(("replica", "data")), spec_of(dim))(terms)
    for shard, expected in zip(found.addressable_shards, emulate(shards), strict=True):
        assert shard.index[dim].start // shape[dim] == SLOT[shard.device.id]
        np.testing.assert_array_equal(shard.data, expected.reshape(shape))


def test_reduction_is_within_the_two_half_steps():
    """Fails for a mean in place of a sum, or if some values are coded three times."""
    axes = ("data", "replica")
    terms = make_terms()

    def run(term):
        return packed.reduce_scatter_codes(term[0], axes, 0, INT4)

    found = np.asarray(mapped(run, P(("replica", "data")), P(axes))(terms))
    # A code is wrong by a half step, and by a step where it is the positive maximum.
    inside = np.abs(terms).max(axis=(1, 2)).sum() / 8
    by_node = terms.reshape(NODES, DEVICES, *SHAPE).sum(axis=1)
    across = sum(np.abs(total).max() + inside for total in by_node) / 8
    error = np.abs(found - terms.sum(axis=0))
    assert error.max() <= inside + across
    assert np.abs(found).max() > inside + across  # that is less than the numbers


def test_zeros_stay_zeros():
    def run(term):
        return packed.reduce_scatter_codes(term[0], ("data", "replica"), 0, INT4)

    terms = np.zeros((RANKS, *SHAPE), np.float32)
    found = mapped(run, P(("replica", "data")), P(("data", "replica")))(terms)
    assert not np.asarray(found).any()


@pytest.mark.parametrize("dim", [0, 1])
def test_gather_equals_coded_shards(dim):
    """Fails if a shard is decoded by the scales of another, or comes elsewhere."""
    axes = ("data", "replica")

    def run(shard):
        return packed.all_gather_codes(shard, axes, dim, INT8)

    x = make_terms()[0]
    found = np.asarray(mapped(run, spec_of(dim), P())(x))
    shards = np.split(x, RANKS, axis=dim)
    expected = [quantise(s.reshape(-1), INT8).reshape(s.shape) for s in shards]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=dim))
    assert 0 < np.abs(found - x).max() <= 1.001 * np.abs(x).max() / 128


CODECS = get_args(choices.hints(schema.Communication)["codec"])
LOSSY = [name for name in CODECS if name != "none"]
SIZES = {"top_k": {"block": 16, "kept": 3}, "bfloat16": {}, "float32": {}}
STEPS = 20


def small_codec(name):
    """A codec whose blocks are small, and their sizes."""
    sizes = SIZES.get(name, {"block": 8})
    return dataclasses.replace(make_codec(name), **sizes), sizes


def mapped_mean(codec, num_workers):
    """`compressed_mean` of arrays whose dim 0 is the worker."""
    mesh = Mesh(jax.devices()[:num_workers], "replica")

    def run(x, errors):
        x, errors = jax.tree.map(lambda a: a[0], (x, errors))
        result = compressed_mean(x, errors, codec, "replica")
        return jax.tree.map(lambda a: a[None], result)

    spec = P("replica")
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"}
        )
    )


def init_errors(n, codec, num_workers):
    """The errors of one worker before its first message of `n` numbers."""
    size = padded_size(n, codec, num_workers)
    return Errors(jnp.zeros(size), jnp.zeros(size // num_workers))


def zero_errors(codec, num_workers, n):
    """The errors of all workers, stacked."""
    errors = init_errors(n, codec, num_workers)
    return jax.tree.map(lambda a: jnp.stack([a] * num_workers), errors)


@functools.cache
def run_steps(name, num_workers):
    """Vectors, means and final errors of some steps, and the explicit workers'."""
    codec, sizes = small_codec(name)
    n = padded_size(100, codec, num_workers)
    run, errors = mapped_mean(codec, num_workers), zero_errors(codec, num_workers, n)
    workers = Workers(name, num_workers, n, **sizes)
    generator = np.random.default_rng(num_workers)
    vectors = generator.normal(0.1, 1, (STEPS, num_workers, n)).astype(np.float32)
    vectors[:, :, 100:] = 0  # padding
    means, expected = [], []
    for vector in vectors:
        mean, errors = run(vector, errors)
        means.append(np.asarray(mean))
        expected.append(workers.mean(vector))
    return vectors, np.stack(means), errors, np.stack(expected), workers


CASES = [
    *(("onebit", num_workers) for num_workers in (1, 2, 8)),
    *((name, 4) for name in LOSSY),
]


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_means_and_errors_are_those_of_explicit_workers(name, num_workers):
    """Fails for a sum, an error that is forgotten, or the scale of another chunk."""
    _, means, errors, expected, workers = run_steps(name, num_workers)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(means[:, 0], expected)
    close(errors.worker, workers.worker_errors)
    close(errors.server, workers.server_errors)


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_every_worker_has_the_same_bits(name, num_workers):
    _, means, *_ = run_steps(name, num_workers)
    for worker in range(num_workers):
        np.testing.assert_array_equal(means[:, worker], means[:, 0])


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_what_messages_lose_is_sent_later(name, num_workers):
    """The sum of all means is the exact one, less what the last errors hold."""
    vectors, means, errors, *_ = run_steps(name, num_workers)
    exact = np.float64(vectors).mean(axis=1).sum(axis=0)
    pending = np.float64(errors.worker).mean(axis=0) + np.ravel(errors.server)
    assert np.abs(pending).max() > 1e-4
    found = np.float64(means[:, 0]).sum(axis=0)
    np.testing.assert_allclose(found, exact - pending, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [*LOSSY, "float32"])
def test_what_is_not_finite_leaves_the_errors_as_they_were(name):
    """Every worker sees it, though one alone sends it."""
    codec, _ = small_codec(name)
    n = padded_size(100, codec, 4)
    run = mapped_mean(codec, 4)
    vectors = np.random.default_rng(0).normal(0, 1, (4, n)).astype(np.float32)
    _, errors = run(vectors, zero_errors(codec, 4, n))
    vectors[2, 77] = np.nan
    mean, after = run(vectors, errors)
    assert not np.isfinite(mean).all(axis=1).any()
    jax.tree.map(np.testing.assert_array_equal, after, errors)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8"])
def test_there_may_be_no_error_feedback(name):
    codec, _ = small_codec(name)
    n = padded_size(100, codec, 4)
    vectors = np.random.default_rng(0).normal(0, 1, (4, n)).astype(np.float32)
    mean, errors = mapped_mean(codec, 4)(vectors, None)
    assert errors is None
    rounding = {"float32": 1e-6, "bfloat16": 2**-7, "float8": 2**-3}[name]
    exact = np.stack([vectors.mean(axis=0)] * 4)
    np.testing.assert_allclose(mean, exact, rtol=0, atol=2 * rounding)


@pytest.mark.parametrize(
    ("name", "num_workers", "expected"),
    [
        ("onebit", 4, 16384),
        ("int8", 4, 8192),
        ("float32", 8, 104),
        ("onebit", 1, 4096),
    ],
)
def test_sizes_are_padded_to_whole_blocks_of_every_worker(name, num_workers, expected):
    codec = make_codec(name)
    assert padded_size(100, codec, num_workers) == expected
    assert padded_size(expected, codec, num_workers) == expected
    errors = init_errors(100, codec, num_workers)
    assert errors.worker.shape == (expected,)
    assert errors.server.shape == (expected // num_workers,)


def messages(codec, num_workers, n):
    """Bytes of the collectives of one worker by dtype, in the lowered program."""
    shapes = [
        jax.ShapeDtypeStruct((num_workers, size), jnp.float32)
        for size in (n, n, n // num_workers)
    ]
    lowered = mapped_mean(codec, num_workers).lower(shapes[0], Errors(*shapes[1:]))
    found = re.findall(
        r"stablehlo\.(\w+)\"?\(.*?-> tensor<([0-9x]*)x(\w+)>", lowered.as_text()
    )
    total = {}
    for operation, dims, dtype in found:
        if operation in ("all_to_all", "all_gather", "all_reduce", "reduce_scatter"):
            size = math.prod(map(int, dims.split("x"))) * int(dtype.strip("uif")) // 8
            total[dtype] = total.get(dtype, 0) + size
    return total


@pytest.mark.parametrize(
    ("name", "dtype", "bits", "scales"),
    [
        ("onebit", "ui8", 1, 1 / 4096),
        ("int4", "ui8", 4, 1 / 2048),
        ("int2", "ui8", 2, 2 / 2048),
        ("int8", "ui8", 8, 1 / 2048),
        ("float8", "ui8", 8, 1 / 2048),
        ("bfloat16", "ui16", 16, 0),
        ("top_k", "ui8", 16 / 64, 2 / 4096),
    ],
)
def test_bytes_on_the_wire(name, dtype, bits, scales):
    """Both messages: a quarter of a byte a number for signs, and no other floats."""
    n, num_workers = 2**18, 4
    found = messages(make_codec(name), num_workers, n)
    size = 2 * n * (bits / 8 + 4 * scales)
    assert found == {dtype: pytest.approx(size, rel=1e-3)}


def test_explicit_workers_have_the_published_mean_of_signs():
    """Vectors of appendix A.1: one scale per worker, then one per chunk."""
    x = np.stack([np.arange(16) - 4.0, np.arange(16) % 5 - 1.5]).astype(np.float32)
    workers = Workers("onebit", 2, 16, block=16)
    expected = [-2.989565] * 4 + [2.989565] * 4 + [3.16587] * 8
    np.testing.assert_allclose(workers.mean(x), expected, rtol=1e-6)
    first = [1.787918, 2.787918, 3.787918, 4.787918]
    first += [-5.787918, -4.787918, -3.787918, -2.787918]
    np.testing.assert_allclose(workers.worker_errors[0, :8], first, rtol=1e-6)
    a, b, c, d = 0.654394, 0.845606, 0.478089, 1.021911
    expected = [[-a, -a, b, b, a, -b, -b, a], [c, c, -d, -d, c, c, c, -d]]
    np.testing.assert_allclose(workers.server_errors, expected, rtol=0, atol=1e-6)
