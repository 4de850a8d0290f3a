"""Experts of few rows on the GPU against the reference and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_experts import add_up
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import Choice, choose_experts, few_rows_experts, lay_router

pytestmark = NEEDS_HOPPER
ROWS = [1, 2, 16, 64]
ROUTERS = [(2048, 128, 8), (4096, 8, 2), (2048, 64, 6), (1024, 256, 1), (2880, 32, 4)]
SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral, narrower": (8, 2, 4096, 3584),
    "OLMoE": (64, 8, 2048, 1024),
    "DeepSeek-V2-Lite": (64, 6, 2048, 1408),
    "gpt-oss": (32, 4, 2880, 2880),
    "one of few": (8, 1, 64, 64),
}


def draw(key, shape, scale=1.0, dtype=jnp.bfloat16):
    values = jax.random.normal(jax.random.key(key), shape, jnp.float32) * scale
    return values.astype(dtype)


def choose(x, matrix, implementation, **settings):
    run = functools.partial(choose_experts, implementation=implementation, **settings)
    return jax.jit(run)(x, matrix)


def mask_of(rows, has_padding):
    return jnp.arange(rows) % 3 != 1 if has_padding else None


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "experts", "top_k"), ROUTERS)
def test_router_chooses_as_the_reference_does(
    width, experts, top_k, rows, dtype, scores, has_padding
):
    x = draw(0, (rows, width))
    matrix = lay_router(draw(1, (width, experts), width**-0.5, dtype), x.dtype)
    settings = dict(
        num_experts=experts,
        top_k=top_k,
        scores=scores,
        scale=2.5,
        counts=mask_of(rows, has_padding),
        bias=draw(2, (experts,), 0.1, jnp.float32) if scores == "sigmoid" else None,
    )
    found = choose(x, matrix, "mosaic_gpu", **settings)
    again = choose(x, matrix, "mosaic_gpu", **settings)
    expected = choose(x, matrix, "reference", **settings)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    gates = np.asarray(expected.gates)
    np.testing.assert_array_equal(np.asarray(found.gates) != 0, gates != 0)
    np.testing.assert_allclose(found.gates, gates, rtol=1e-4, atol=1e-6)
    most = expected.most
    np.testing.assert_array_equal(found.ids[:most], expected.ids)
    np.testing.assert_array_equal(found.ids[most:], -1)
    np.testing.assert_array_equal(found.count[:most], expected.count)


@pytest.mark.parametrize("rows", ROWS)
def test_the_first_of_equal_experts_is_chosen(rows):
    x, matrix = jnp.ones((rows, 256), jnp.bfloat16), jnp.zeros((256, 128), jnp.bfloat16)
    found = choose(x, matrix, "mosaic_gpu", num_experts=100, top_k=5)
    np.testing.assert_array_equal(found.ids[:6], [0, 1, 2, 3, 4, -1])
    np.testing.assert_allclose(found.gates[:5, :rows], 0.2, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_norm_is_fused_in_the_router(rows):
    """Signs alone: a norm of equal squares rounds nothing."""
    x, scale = jnp.sign(draw(0, (rows, 2048))), jnp.ones(2048, jnp.bfloat16)
    matrix = lay_router(draw(1, (2048, 128), 0.02, jnp.float32), x.dtype)
    settings = dict(num_experts=128, top_k=8, norm=(scale, 3.0))
    found = choose(x, matrix, "mosaic_gpu", **settings)
    expected = choose(x, matrix, "reference", **settings)
    np.testing.assert_allclose(found.gates, expected.gates, rtol=1e-4, atol=1e-6)


def make_case(
    rows,
    shape,
    *,
    activation="swiglu",
    normal=False,
    has_padding=False,
    has_biases=False,
):
    """Rows, weights of experts, matrices and settings."""
    experts, top_k, width, hidden = shape
    parts = 2 if "glu" in activation else 1
    up = draw(3, (experts, width, hidden * parts), width**-0.5)
    down = draw(4, (experts, hidden, width), hidden**-0.5)
    rng, gates = np.random.default_rng(5), np.zeros((rows, experts), np.float32)
    for row in gates:
        row[rng.choice(experts, top_k, replace=False)] = rng.uniform(0.1, 1, top_k)
    if has_padding:
        gates[~np.asarray(mask_of(rows, True))] = 0
    settings = dict(
        activation=activation,
        norm=(draw(6, (width,)), 0.1) if normal else None,
        residual=draw(7, (rows, width)),
    )
    if has_biases:
        settings["up_bias"] = draw(8, (experts, hidden * parts))
        settings["down_bias"] = draw(9, (experts, width))
    choice = Choice.of(jnp.asarray(gates.T), min(experts, rows * top_k))
    return draw(0, (rows, width)), gates, choice, up, down, settings


def run_kernel(x, choice, up, down, settings, **given):
    @jax.jit
    def run(x, choice, up, down):
        settings_given = dict(implementation="mosaic_gpu", **settings, **given)
        return few_rows_experts(x, choice, up, down, **settings_given)

    return np.float32(run(x, choice, up, down))


def assert_computed(x, gates, choice, up, down, settings):
    """Compares with NumPy, and a call with another call."""
    found = run_kernel(x, choice, up, down, settings)
    np.testing.assert_array_equal(found, run_kernel(x, choice, up, down, settings))
    used = np.flatnonzero(gates.any(0))
    matrices = (np.float32(y[used]) for y in (up, down))
    for name in {"up_bias", "down_bias"} & {*settings}:
        settings |= {name: np.float32(settings[name])[used]}
    expected = add_up(x, gates[:, used], *matrices, **settings)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_add_up_experts(name, rows, has_padding):
    assert_computed(*make_case(rows, SHAPES[name], has_padding=has_padding))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("activation", ["gelu", "clamped_swiglu"])
@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_options_are_fused(rows, activation, normal, has_biases):
    settings = dict(activation=activation, normal=normal, has_biases=has_biases)
    assert_computed(*make_case(rows, SHAPES["OLMoE"], **settings))


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "one of few"])
def test_a_row_does_not_depend_on_other_rows_or_experts(name):
    """Fails if a sum changes by a bit with the experts of other rows."""
    x, gates, _, up, down, settings = make_case(8, SHAPES[name])
    most = gates.shape[1]
    choice = Choice.of(jnp.asarray(gates.T), most)
    found = run_kernel(x, choice, up, down, settings)
    of_others = up.at[np.flatnonzero(gates[0] == 0)].set(jnp.nan)
    others = run_kernel(x, choice, of_others, down, settings)
    np.testing.assert_array_equal(found[0], others[0])
    alone = Choice.of(jnp.asarray(gates[:1].T), most)
    settings = settings | {"residual": settings["residual"][:1]}
    np.testing.assert_array_equal(
        found[:1], run_kernel(x[:1], alone, up, down, settings)
    )


def test_padding_alone_adds_nothing():
    x, gates, _, up, down, settings = make_case(4, SHAPES["OLMoE"])
    choice = Choice.of(jnp.zeros(gates.T.shape), 32)
    found = run_kernel(x, choice, up, down, settings)
    np.testing.assert_array_equal(found, np.float32(settings["residual"]))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_early_kernels_compute_the_same(rows):
    """Fails if a kernel reads a choice, or rows, before the last one has ended."""
    x, _, _, up, down, _ = make_case(rows, SHAPES["Qwen3-30B-A3B"])
    matrices = [
        lay_router(draw(10 + n, (2048, 128), 0.02, jnp.float32), x.dtype)
        for n in range(4)
    ]
    norm = jnp.ones(2048, x.dtype), 1e-6

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, early):
        settings = dict(norm=norm, early=early, implementation="mosaic_gpu")
        for number in range(20):
            matrix = matrices[number % len(matrices)]
            choice = choose_experts(x, matrix, num_experts=128, top_k=8, **settings)
            x = few_rows_experts(x, choice, up, down, residual=x, **settings)
        return x

    expected = np.float32(run(x, False))
    assert np.isfinite(expected).all()
    for _ in range(5):
        np.testing.assert_array_equal(np.float32(run(x, True)), expected)
