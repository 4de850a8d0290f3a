"""Codes and rounded values against NumPy, and the gradient that passes rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops import narrow, rounding
from zjax.settings.quantize import Quantize, Rule

LAST = {"int8": 127, "int4": 7, "int3": 3, "float8": 448, "mxfp4": 6, "nf4": 1}
LEVELS = {
    **{kind: np.arange(-n, n + 1.0) for kind, n in LAST.items() if "int" in kind},
    "float8": np.float32(np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)),
    "mxfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    # Quantiles of the normal distribution, to the digits of the paper.
    "nf4": np.array(
        [
            *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343),
            *(-0.091050036, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524),
            *(0.44070983, 0.562617, 0.72295684, 1.0),
        ]
    ),
}
LEVELS["float8"] = LEVELS["float8"][np.isfinite(LEVELS["float8"])]
LEVELS["mxfp4"] = np.unique([*-LEVELS["mxfp4"], *LEVELS["mxfp4"]])


@pytest.fixture(autouse=True)
def has_qwix(request):
    if "nf4" in request.node.name:
        pytest.importorskip("qwix", reason="needs qwix")


def oracle(matrix, kind, group):
    """The nearest level times the scale of each group, in NumPy."""
    wide, dtype = np.asarray(matrix, np.float32), matrix.dtype
    found, steps = np.empty_like(wide), np.empty_like(wide)
    for start in range(0, len(wide), group):
        rows = slice(start, start + group)
        scales = np.abs(wide[rows]).max(axis=0) / np.float32(LAST[kind])
        if kind == "mxfp4":
            scales = 2.0 ** np.ceil(np.log2(np.float64(scales)))
        scales = np.float32(np.asarray(np.float32(scales), dtype))
        scales = np.where(scales == 0, 1, scales)
        distance = wide[rows] / scales
        nearest = np.abs(distance[..., None] - LEVELS[kind]).argmin(axis=-1)
        found[rows] = np.asarray(LEVELS[kind][nearest] * scales, dtype)
        steps[rows] = scales
    return found, steps


def make_matrix(depth, columns=5, dtype=jnp.float32):
    rng = np.random.default_rng(depth)
    spread = rng.uniform(0.01, 2, size=columns)
    return jnp.asarray(rng.normal(size=(depth, columns)) * spread, dtype)


def test_rules_are_read_in_order():
    rules = Quantize(rules=(Rule(pattern="mlp", weights="int8"), Rule(pattern="att")))
    assert rules.rule_of("blocks/mlp/up") == Rule(pattern="mlp", weights="int8")
    assert rules.rule_of("blocks/attention/key") == Rule(pattern="att")
    assert rules.rule_of("head") is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("depth", "most", "group"), [(256, 128, 128), (192, 128, 96), (23, 0, 23)]
)
@pytest.mark.parametrize("kind", LAST)
def test_values_are_the_nearest_levels(kind, depth, most, group, dtype):
    """Fails if a scale is shared by the wrong inputs, or a code is not the nearest."""
    matrix = make_matrix(depth, dtype=dtype)
    found = np.float32(rounding.rounded(matrix, kind, most))
    expected, steps = oracle(matrix, kind, group)
    # Ties may go to either neighbour.
    other = np.abs(found - expected) > 1e-6 * np.abs(expected) + 1e-9
    error = np.abs(np.float32(matrix) - found)
    best = np.abs(np.float32(matrix) - expected)
    # A cast to mxfp4 rounds to 16 bits on the way.
    digits = 2**-8 if dtype == jnp.bfloat16 else 2**-11
    slack = (np.abs(expected) + steps) * digits
    assert other.mean() < 0.02
    assert (error <= best + slack).all()
    assert (found != np.float32(matrix)).mean() > 0.5


@pytest.mark.parametrize("kind", LAST)
def test_rounded_values_are_few_and_stay(kind):
    """Fails if nothing is rounded, or values of codes are rounded elsewhere."""
    matrix = make_matrix(128, 3)
    found = np.asarray(rounding.rounded(matrix, kind, 64))
    for group in found.reshape(2, 64, 3).transpose(0, 2, 1).reshape(6, 64):
        assert len(np.unique(group)) <= len(LEVELS[kind]) < 256
    if kind in ("int4", "int3", "nf4", "mxfp4"):
        assert len(np.unique(np.asarray(matrix)[:64, 0])) > 60
    again = rounding.rounded(jnp.asarray(found), kind, 64)
    np.testing.assert_allclose(again, found, rtol=3e-7)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_are_those_that_texts_are_written_with(kind, dtype):
    """Fails if a trained grid is not the grid of `zjax generate`, bit for bit."""
    matrix = make_matrix(192, dtype=dtype)
    stored = narrow.dequantize(narrow.quantize(matrix, kind))
    most = narrow.GROUP if kind == "int4" else 0
    found = rounding.rounded(matrix, kind, most)
    np.testing.assert_array_equal(np.float32(found), np.float32(stored))


@pytest.mark.parametrize("kind", LAST)
def test_matrices_of_zeros_of_one_value_and_with_an_outlier(kind):
    """Fails if zeros divide by zero, or values of other groups see an outlier."""
    assert not rounding.rounded(jnp.zeros((8, 3)), kind, 4).any()
    # Scales of mxfp4 are powers of two.
    value = 0.75 if kind == "mxfp4" else 0.3
    one = rounding.rounded(jnp.full((7, 1), value), kind, 0)
    np.testing.assert_allclose(one, value, rtol=1e-6)
    matrix = make_matrix(16, 2)
    found = rounding.rounded(matrix.at[3, 0].set(1e4), kind, 8)
    top = 8192 if kind == "mxfp4" else 1e4
    np.testing.assert_allclose(found[3, 0], top, rtol=0.25)
    others = jnp.abs(found[:8, 0].at[3].set(0))
    limit = {"int8": 1e-9, "int4": 1e-9, "int3": 1e-9, "nf4": 1e-9, "mxfp4": 1e-9}
    assert others.max() < limit.get(kind, 20)
    clean = rounding.rounded(matrix, kind, 8)
    np.testing.assert_array_equal(found[8:], clean[8:])
    np.testing.assert_array_equal(found[:, 1], clean[:, 1])


@pytest.mark.parametrize("kind", ["int4", "float8", "mxfp4"])
def test_broken_weights_stay_broken(kind):
    """Fails if NaN or infinity becomes a number."""
    for value in (jnp.nan, jnp.inf):
        found = rounding.rounded(jnp.ones((4, 2)).at[1, 0].set(value), kind, 0)
        assert not np.isfinite(found[1, 0])
        assert np.isfinite(found[:, 1]).all()


@pytest.mark.parametrize("kind", LAST)
def test_the_gradient_passes_rounding(kind):
    """Fails if a gradient is zero, scaled, or of unrounded values."""
    matrix, x = make_matrix(16, 3), np.array([[1, -2], [0.5, 3]], np.float32)
    x = np.resize(x, (4, 16))

    def loss(matrix):
        return jnp.sum((x @ rounding.rounded(matrix, kind, 8)) ** 2)

    value = np.float32(rounding.rounded(matrix, kind, 8))
    expected = 2 * x.T @ (x @ value)
    np.testing.assert_allclose(jax.grad(loss)(matrix), expected, rtol=2e-5)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_rows_have_a_scale_each(kind):
    """Fails if tokens share a scale, dims of a token do not, or gradients stop."""
    rows = jax.random.normal(jax.random.key(0), (2, 3, 4, 8)) * 10.0 ** jnp.arange(
        3
    ).reshape(1, 3, 1, 1)
    found = np.asarray(rounding.rounded_rows(rows, kind, 2))
    flat = np.asarray(rows).reshape(6, 32)
    expected = np.stack([oracle(row[:, None], kind, 32)[0][:, 0] for row in flat])
    np.testing.assert_allclose(found.reshape(6, 32), expected, rtol=1e-5)
    assert (found != np.asarray(rows)).mean() > 0.5
    grad = jax.grad(lambda x: jnp.sum(rounding.rounded_rows(x, kind, 2) * rows))(rows)
    np.testing.assert_array_equal(grad, rows)
    assert not rounding.rounded_rows(jnp.zeros((2, 4)), kind).any()


def test_kernels_of_a_stack_are_rounded_alone():
    """Fails if groups span layers, or dims of heads break the order of inputs."""
    kernel = jax.random.normal(jax.random.key(1), (2, 3, 4, 5, 2))
    rule = Rule(group_size=6)
    found = rounding.rounded_kernel(kernel, rule, num_outputs=2, num_stacked=1)
    for one, both in zip(kernel, found, strict=True):
        expected, _ = oracle(one.reshape(12, 10), "int4", 6)
        np.testing.assert_allclose(both.reshape(12, 10), expected, atol=1e-6)
