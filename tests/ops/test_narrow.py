"""Codes of matrices against NumPy, and the products that rows of any number take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.lowering import num_kernels
from zjax.ops import narrow
from zjax.ops.matmul import dot_few_rows

LAST = {"int8": 127, "int4": 7, "float8": 448}
DTYPES = {"int8": jnp.int8, "int4": jnp.int4, "float8": jnp.float8_e4m3fn}
BITS = {"int8": 8, "int4": 4, "float8": 8}


def rounded(matrix, kind, group):
    """Each value as the nearest code times a scale, group by group, in NumPy."""
    wide = np.float32(matrix)
    found = np.empty_like(wide)
    for start in range(0, len(wide), group):
        some = wide[start : start + group]
        largest = np.abs(some).max(axis=0) / LAST[kind]
        scales = np.float32(np.asarray(largest, matrix.dtype))
        codes = some / scales
        if kind == "float8":
            codes = np.float32(np.asarray(codes, jnp.float8_e4m3fn))
        found[start : start + group] = np.round(codes, 8 if kind == "float8" else 0)
        found[start : start + group] *= scales
    return found


def make_matrix(depth, columns, dtype=jnp.float32):
    rng = np.random.default_rng(depth)
    spread = rng.uniform(0.01, 2, size=columns)
    return jnp.asarray(rng.normal(size=(depth, columns)) * spread, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("depth", "group"), [(256, 128), (192, 96), (23, 23)])
@pytest.mark.parametrize("kind", LAST)
def test_codes_are_the_nearest_multiples_of_scales(kind, depth, group, dtype):
    """Fails if a scale is shared by the wrong numbers, or a code is not the nearest."""
    matrix = make_matrix(depth, 6, dtype)
    found = narrow.quantize(matrix, kind)
    assert found.codes.dtype == DTYPES[kind]
    assert found.scales.dtype == dtype
    shared = group if kind == "int4" else depth
    widened = np.float32(narrow.dequantize(found))
    expected = np.float32(jnp.asarray(rounded(matrix, kind, shared), dtype))
    np.testing.assert_allclose(widened, expected, rtol=2**-7, atol=1e-6)
    step = np.abs(np.float32(matrix)).max(axis=0) / LAST[kind]
    error = np.abs(widened - np.float32(matrix)).max(axis=0)
    assert (error <= step * (17 if kind == "float8" else 0.51 + LAST[kind] / 256)).all()


def test_a_matrix_of_zeros_has_codes_and_nan_stays():
    """Fails if zeros divide by zero, or a broken weight becomes a number."""
    zeros = jnp.zeros((4, 2), jnp.bfloat16)
    for kind in LAST:
        assert not narrow.dequantize(narrow.quantize(zeros, kind)).any()
        broken = narrow.quantize(zeros.at[1, 0].set(jnp.nan), kind)
        found = narrow.multiply(jnp.ones((1, 4), zeros.dtype), broken)
        assert np.isnan(np.float32(found)).tolist() == [[True, False]]


FUSED = {
    "plain": {},
    "a norm and gates": dict(norm=True, activation="swiglu"),
    "a residual": dict(adds=True),
}


def make_product(num_rows, options, depth=256, columns=64, dtype=jnp.float32):
    """Rows, a matrix, and what is fused with their product."""
    rng = np.random.default_rng(0)
    outputs = columns // 2 if options.get("activation") else columns
    shapes = (num_rows, depth), (depth,), (num_rows, outputs)
    rows, scale, residual = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes
    )
    fused = {}
    if options.get("norm"):
        fused["norm"] = scale, 1e-5
    if options.get("activation"):
        fused["activation"] = options["activation"]
    if options.get("adds"):
        fused["residual"] = residual
    return rows, make_matrix(depth, columns, dtype) / depth**0.5, fused


@pytest.mark.parametrize("options", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("num_rows", [1, 3, 70, 300])
@pytest.mark.parametrize("kind", LAST)
def test_products_are_those_of_the_dequantised_matrix(kind, num_rows, options):
    """Fails if a way to multiply, or a piece of rows, computes something else."""
    rows, matrix, fused = make_product(num_rows, options)
    codes = narrow.quantize(matrix, kind)
    found = dot_few_rows(rows, codes, **fused)
    expected = dot_few_rows(rows, narrow.dequantize(codes), **fused)
    # Rows are rounded to 4 bits of float8, too: 3 % each, of gates and of values.
    error = 0.12 if kind == "float8" else 1e-5
    np.testing.assert_allclose(
        found, expected, atol=error * np.abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_sums_of_gates_stay_in_range(kind):
    """Fails if sums of gates are rounded to float16, where 71,680 is infinite."""
    rows = jnp.full((70, 256), 280, jnp.float16)
    matrix = jnp.ones((256, 2), jnp.float16)
    matrix = matrix.at[:, 1].set(0).at[0, 1].set(0.002)  # a value of 0.56
    found = narrow.multiply(rows, narrow.quantize(matrix, kind), activation="swiglu")
    np.testing.assert_allclose(np.float32(found), 71_680 * 0.56, rtol=0.02)


def test_gates_and_a_residual_are_rounded_once():
    """Fails if an activation is rounded before a residual is added."""
    identity = 127 * jnp.tile(jnp.eye(128, dtype=jnp.bfloat16), (1, 2))
    codes = narrow.quantize(identity, "int8")  # of scale 1: sums have no rounding
    sizes = 0.5 ** (3 + np.arange(70)[:, None] % 8)
    rows = jnp.tile(jnp.asarray(sizes, jnp.bfloat16), (1, 128))
    rng = np.random.default_rng(0)
    residual = jnp.asarray(rng.uniform(0, 4, rows.shape), jnp.bfloat16)
    found = narrow.multiply(rows, codes, activation="swiglu", residual=residual)
    gate = 127 * sizes
    exact = gate * gate / (1 + np.exp(-gate)) + np.float32(residual)
    np.testing.assert_array_equal(found, jnp.asarray(exact, jnp.bfloat16))


@pytest.mark.parametrize("kind", LAST)
def test_a_row_does_not_depend_on_rows_beside_it(kind):
    rows, matrix, _ = make_product(64, {})
    codes = narrow.quantize(matrix, kind)
    together = narrow.multiply(rows, codes)
    loud = narrow.multiply(rows.at[1:].multiply(1000), codes)
    np.testing.assert_array_equal(together[0], loud[0])


def dtypes_of_products(kind, num_rows, monkeypatch):
    """Rows and dtype of the weights, and number of groups, of each product."""
    rows, matrix, _ = make_product(num_rows, {})
    codes, found = narrow.quantize(matrix, kind), []
    real = narrow.few_rows_matmul

    def watched(x, weights, *, scales=None, **settings):
        found.append(
            (len(x), weights.dtype.name, len(() if scales is None else scales))
        )
        return real(x, weights, scales=scales, **settings)

    monkeypatch.setattr(narrow, "few_rows_matmul", watched)
    narrow.multiply(rows, codes)
    return found


@pytest.mark.parametrize(
    ("num_rows", "fused"),
    [(16, {"norm", "activation"}), (64, {"activation"}), (65, set())],
)
def test_many_rows_leave_norms_and_gates_out_of_the_kernel(
    num_rows, fused, monkeypatch
):
    """Fails if each program of the kernel normalises many rows for itself."""
    rows, matrix, options = make_product(
        num_rows, {"norm": True, "activation": "swiglu"}
    )
    calls, real = [], narrow.few_rows_matmul

    def watched(*args, **settings):
        calls.append({name for name in ("norm", "activation") if settings.get(name)})
        return real(*args, **settings)

    monkeypatch.setattr(narrow, "few_rows_matmul", watched)
    narrow.multiply(rows, narrow.quantize(matrix, "int8"), **options)
    assert calls == [fused]


@pytest.mark.parametrize(
    ("kind", "num_rows", "products"),
    [
        ("int8", 1, [(1, "int8", 1)]),
        ("int8", 128, [(128, "int8", 1)]),
        # A scale of each column: XLA widens codes inside of the product.
        ("int8", 129, [(129, "int8", 1)]),
        ("int4", 64, [(64, "int4", 2)]),
        ("int4", 256, [(128, "int4", 2)] * 2),
        ("int4", 257, [(257, "float32", 0)]),
        ("float8", 1, [(1, "float8_e4m3fn", 1)]),
        ("float8", 576, [(576, "float8_e4m3fn", 1)]),
    ],
)
def test_rows_choose_the_product(kind, num_rows, products, monkeypatch):
    assert dtypes_of_products(kind, num_rows, monkeypatch) == products


def test_a_product_of_float8_is_one():
    """Fails if codes or rows are widened before they meet."""
    rows, matrix, _ = make_product(3, {})
    codes = narrow.quantize(matrix, "float8")
    [product] = [
        eqn
        for eqn in jax.make_jaxpr(narrow.multiply)(rows, codes).jaxpr.eqns
        for eqn in getattr(eqn.params.get("jaxpr"), "eqns", [eqn])
        if eqn.primitive.name == "dot_general"
    ]
    assert {x.aval.dtype.name for x in product.invars} == {"float8_e4m3fn"}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_kernels_take_codes(kind, monkeypatch):
    """Fails if codes are in a form that the kernel for Hopper GPUs does not take."""
    device = pytest.importorskip("zjax_kernels.device")
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    options = dict(norm=True, activation="swiglu")
    shape = dict(depth=512, columns=256, dtype=jnp.bfloat16)
    rows, matrix, fused = make_product(128, options, **shape)
    codes = narrow.quantize(matrix, kind)

    def run(rows, codes):
        return narrow.multiply(rows, codes, **fused)

    assert num_kernels(run, rows, codes) == 1
    assert num_kernels(run, rows[:1], codes) == 1
    assert num_kernels(run, jnp.tile(rows, (3, 1)), codes) == 0


@pytest.mark.parametrize("kind", LAST)
def test_bytes_are_those_of_codes_and_scales(kind):
    found = narrow.quantize(make_matrix(1024, 8, jnp.bfloat16), kind)
    scales = 2 * (8 if kind == "int4" else 1) * 8
    assert found.scales.nbytes == scales
    assert found.codes.size * BITS[kind] // 8 == 1024 * 8 * BITS[kind] // 8
