"""Means of packed messages with error feedback, against explicit workers in NumPy."""

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
from zjax.ops.codecs import make_codec
from zjax.ops.packed import Errors, compressed_mean, padded_size
from zjax.settings import choices, schema

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
