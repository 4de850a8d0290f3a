"""GPTQ, AWQ and SmoothQuant on one layer, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from zjax.compress.awq import NUM_EXPONENTS, awq_factors
from zjax.compress.folding import Fold, divide_outputs
from zjax.compress.gptq import gptq
from zjax.compress.grid import Grid, round_to_nearest
from zjax.compress.smoothquant import smoothquant_factors
from zjax.compress.statistics import add_tokens, empty, output_error

LAST = {"int8": 127, "int4": 7, "int3": 3}


def make_layer(num_inputs=48, num_outputs=5, num_tokens=300, seed=0):
    """Makes a matrix, and inputs that depend on one another and differ in size."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(num_inputs, num_inputs)) / num_inputs**0.5
    mix *= np.exp(rng.normal(size=num_inputs))
    x = (rng.normal(size=(num_tokens, num_inputs)) @ mix).astype(np.float32)
    return jnp.asarray(rng.normal(size=(num_inputs, num_outputs)), jnp.float32), x


def statistics_of(x):
    return add_tokens(empty(x.shape[1]), jnp.asarray(x))


def error_of(values, kernel, x):
    """Mean squared error of the outputs, from the inputs themselves."""
    change = np.asarray(values, np.float64) - np.asarray(kernel)
    return ((x.astype(np.float64) @ change) ** 2).sum() / len(x)


def oracle(kernel, x, last, group, damp=0.01, order=None):
    """GPTQ input by input, with the inverse shrunk by elimination (no Cholesky)."""
    kernel = np.array(kernel, np.float64)
    hessian = 2 * x.astype(np.float64).T @ x / len(x)
    dead = np.diag(hessian) == 0
    mean = np.diag(hessian).sum() / max(1, (~dead).sum())
    hessian[dead, dead] = mean or 1
    hessian += damp * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(hessian)
    fixed = np.abs(kernel).reshape(-1, group, kernel.shape[1]).max(1) / last
    scales = np.maximum(fixed, np.finfo(np.float32).tiny)
    values = np.zeros_like(kernel)
    for place in range(len(kernel)) if order is None else order:
        if order is None and place % group == 0:
            members = np.abs(kernel[place : place + group]).max(0) / last
            scales[place // group] = np.maximum(members, np.finfo(np.float32).tiny)
        scale = scales[place // group]
        values[place] = np.clip(np.round(kernel[place] / scale), -last, last) * scale
        error = (kernel[place] - values[place]) / inverse[place, place]
        kernel -= inverse[:, place : place + 1] * error
        inverse -= (
            inverse[:, place : place + 1] * inverse[place] / inverse[place, place]
        )
    return values, scales


@pytest.mark.parametrize(
    ("weights", "group", "shape"),
    [
        ("int4", 16, (48, 5)),
        ("int3", 0, (48, 5)),
        ("int8", 8, (40, 3)),
        ("int4", 128, (23, 1)),
    ],
)
def test_gptq_equals_the_oracle(weights, group, shape):
    kernel, x = make_layer(*shape)
    grid = Grid(weights, group)
    found = gptq(kernel, statistics_of(x).hessian, grid)
    expected, scales = oracle(kernel, x, LAST[weights], grid.group_of(shape[0]))
    np.testing.assert_allclose(found.scales, scales, rtol=1e-3)
    # A value in the middle of two codes may go either way in float32.
    same = np.isclose(found.values, expected, rtol=1e-3, atol=1e-5)
    assert same.mean() > 0.98
    assert error_of(found.values, kernel, x) < 0.9 * error_of(
        round_to_nearest(kernel, grid).values, kernel, x
    )


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_methods_keep_the_codes_of_a_matrix_on_the_grid(weights):
    """Fails if weights that training rounded are rounded to other codes."""
    kernel, x = make_layer()
    grid = Grid(weights, 16, "bfloat16")
    learned = round_to_nearest(kernel, grid)
    found = gptq(learned.values, statistics_of(x).hessian, grid)
    np.testing.assert_array_equal(found.values, learned.values)
    np.testing.assert_array_equal(found.scales, learned.scales)
    factors = awq_factors(learned.values, statistics_of(x), grid)
    np.testing.assert_array_equal(factors, np.ones(48))


def test_gptq_in_the_order_of_activations_equals_the_oracle():
    kernel, x = make_layer()
    grid = Grid("int4", 16)
    hessian = statistics_of(x).hessian
    found = gptq(kernel, hessian, grid, activation_order=True)
    order = np.argsort(-np.diag(hessian), kind="stable")
    expected, scales = oracle(kernel, x, 7, 16, order=order)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-5)
    assert np.isclose(found.values, expected, rtol=1e-3, atol=1e-5).mean() > 0.98


def test_gptq_spreads_errors_over_blocks():
    # 300 inputs are three blocks of 128, the last one padded.
    kernel, x = make_layer(300, 4, 900)
    grid = Grid("int4", 0)
    found = gptq(kernel, statistics_of(x).hessian, grid)
    expected, _ = oracle_fixed(kernel, x)
    assert np.isclose(found.values, expected, rtol=1e-3, atol=1e-5).mean() > 0.95


def oracle_fixed(kernel, x):
    """The oracle with the scales of the matrix as it was."""
    return oracle(kernel, x, 7, len(kernel), order=np.arange(len(kernel)))


KERNELS = {
    "zeros": np.zeros((24, 3), np.float32),
    "one value": np.full((24, 3), 0.5, np.float32),
    "outlier": np.r_[np.full((23, 3), 0.1), np.full((1, 3), 1e4)].astype(np.float32),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("inputs", ["usual", "singular", "dead", "zeros", "outlier"])
def test_gptq_of_unusual_layers_is_finite_and_on_the_grid(name, inputs):
    kernel, (_, x) = jnp.asarray(KERNELS[name]), make_layer(24, 3, 100)
    x = {
        "usual": x,
        "singular": np.repeat(x[:, :1], 24, axis=1),
        "dead": x * (np.arange(24) % 3 > 0),
        "zeros": np.zeros_like(x),
        "outlier": x * np.where(np.arange(24) == 5, 1e4, 1),
    }[inputs].astype(np.float32)
    found = gptq(kernel, statistics_of(x).hessian, Grid("int4", 8))
    assert np.isfinite(found.values).all() and np.isfinite(found.scales).all()
    codes = (
        np.asarray(found.values).reshape(3, 8, 3) / np.asarray(found.scales)[:, None]
    )
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-4)
    assert np.abs(codes).max() <= 7 + 1e-4
    if inputs == "zeros":
        np.testing.assert_array_equal(
            found.values, round_to_nearest(kernel, Grid("int4", 8)).values
        )


def test_statistics_equal_numpy_and_leave_padding_out():
    _, x = make_layer(10, 1, 60)
    mask = np.arange(60) % 4 > 0
    dirty = np.where(mask[:, None], x, np.nan)
    found = empty(10)
    for start in (0, 20, 40):
        rows = slice(start, start + 20)
        found = add_tokens(found, jnp.asarray(dirty[rows]), jnp.asarray(mask[rows]))
    kept = x[mask].astype(np.float64)
    assert found.num_tokens == len(kept)
    np.testing.assert_allclose(
        found.hessian, 2 * kept.T @ kept / len(kept), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(found.mean, np.abs(kept).mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.largest, np.abs(kept).max(0), rtol=1e-6)
    change = np.random.default_rng(1).normal(size=(10, 2)).astype(np.float32)
    np.testing.assert_allclose(
        output_error(jnp.asarray(change), found.hessian),
        error_of(change, 0, kept),
        rtol=1e-4,
    )


def test_awq_takes_the_exponent_of_least_error():
    kernel, x = make_layer(32, 6)
    x[:, 3] *= 30
    found, grid = statistics_of(x), Grid("int4", 16)
    errors, all_factors = [], []
    for exponent in np.arange(NUM_EXPONENTS) / NUM_EXPONENTS:
        factors = jnp.abs(jnp.asarray(x)).mean(0) ** exponent
        factors = factors / jnp.sqrt(factors.max() * factors.min())
        rounded = round_to_nearest(kernel * factors[:, None], grid).values
        errors.append(error_of(rounded / factors[:, None], kernel, x))
        all_factors.append(factors)
    best = int(np.argmin(errors))
    np.testing.assert_allclose(
        awq_factors(kernel, found, grid), all_factors[best], rtol=1e-4
    )
    assert 0 < best and errors[best] < 0.7 * errors[0]


def test_smoothquant_halves_outliers_between_activations_and_weights():
    kernel, x = make_layer(32, 6)
    x[:, 3] *= 100
    factors = np.asarray(smoothquant_factors(kernel, jnp.asarray(np.abs(x).max(0))))
    expected = np.sqrt(np.abs(x).max(0) / np.abs(kernel).max(1))
    np.testing.assert_allclose(factors, expected, rtol=1e-5)
    # Both sides of the product are then as large in each channel.
    np.testing.assert_allclose(
        np.abs(x / factors).max(0), np.abs(kernel * factors[:, None]).max(1), rtol=1e-4
    )
    dead = smoothquant_factors(kernel, jnp.zeros(32))
    np.testing.assert_array_equal(dead, np.ones(32))


@pytest.mark.parametrize("zero_centered", [True, False])
def test_factors_lose_nothing_in_a_norm_of_sixteen_bits(zero_centered):
    """Fails if consumers are multiplied by other factors than the norm divides by."""
    rng = np.random.default_rng(0)
    offset = float(zero_centered)
    before = np.append(rng.lognormal(0, 0.5, 200) * rng.choice([-1, 1], 200), 0.0)
    params = {"n/scale": jnp.asarray(before - offset, jnp.bfloat16)}
    before = np.float32(params["n/scale"]) + offset
    factors = np.float32(np.geomspace(0.02, 1e4, 201))
    fold = Fold("n", ("up",), is_norm=True, zero_centered=zero_centered)
    changed, by = divide_outputs(params, fold, jnp.asarray(factors), "bfloat16")
    stored = np.asarray(changed["n/scale"])
    np.testing.assert_array_equal(stored, np.float32(jnp.bfloat16(stored)))
    # What a consumer reads, in units of the scale before.
    np.testing.assert_allclose((stored + offset) * by, before, rtol=1e-6)
    assert (np.asarray(by) > 0).all() and np.isfinite(by).all()
    usual = np.abs(before) / factors > 0.1
    np.testing.assert_allclose(np.asarray(by)[usual], factors[usual], rtol=0.04)
    # The factors themselves would change outputs of the norm by more than 1 %.
    lost = np.float32(jnp.bfloat16(before / factors - offset)) + offset
    error = np.abs(lost * factors - before).max() / np.abs(before).max()
    assert (error > 0.01) == zero_centered
