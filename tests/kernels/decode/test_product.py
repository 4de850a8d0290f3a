"""Products of few rows: the reference against NumPy, and what is refused."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax.ops.rounding import quantize_blocks
from zjax_kernels import device, few_rows_matmul
from zjax_kernels.decode.product.reference import interleaved, restored


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_reference_sums_in_float32(dtype):
    """Fails if a sum of many equal numbers stops to grow, as sums in 16 bits do."""
    x, weights = jnp.ones((2, 4096), dtype), jnp.ones((4096, 3), dtype)
    found = few_rows_matmul(x, weights)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.float32(found), np.full((2, 3), 4096.0))


def test_reference_multiplies_rows_by_columns():
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(3, 5)), rng.normal(size=(5, 4))
    found = few_rows_matmul(jnp.float32(x), jnp.float32(weights))
    expected = [[sum(row * column) for column in weights.T] for row in x]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "": lambda total: total,
    "gelu": gelu,
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "clamped_swiglu": lambda gate, up: (
        np.minimum(gate, 7)
        * sigmoid(1.702 * np.minimum(gate, 7))
        * (np.clip(up, -7, 7) + 1)
    ),
}


def fused(x, weights, *, scales=None, norm=None, activation="", residual=None):
    """What the options mean, in NumPy."""
    x, weights = np.float64(x), np.float64(weights)
    if scales is not None:
        groups = np.repeat(np.float64(scales), x.shape[1] // len(scales), axis=0)
        weights = weights.T * groups
    if norm is not None:
        scale, eps = norm
        deviation = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
        x = x / deviation * np.float64(scale)
    parts = np.split(x @ weights, 2 if "glu" in activation else 1, axis=1)
    total = ACTIVATIONS[activation](*parts)
    return total if residual is None else total + np.float64(residual)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.float8_e4m3fn])
def test_codes_are_transposed_and_scaled_by_groups(dtype):
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-7, 8, size=(6, 8)), dtype)
    x, scales = (jnp.float32(rng.normal(size=shape)) for shape in ((3, 8), (2, 6)))
    found = few_rows_matmul(x, codes, scales=scales, activation="swiglu")
    expected = fused(x, codes, scales=scales, activation="swiglu")
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
@pytest.mark.parametrize("groups", [1, 4])
def test_codes_are_in_the_order_of_the_kernel(dtype, groups):
    """Fails if words of 16 bits pair other channels than the kernel multiplies."""
    rng = np.random.default_rng(0)
    codes, bits = rng.integers(-7, 8, size=(6, 512)), jnp.iinfo(dtype).bits
    x, scales = (
        jnp.float32(rng.normal(size=(n, m))) for n, m in ((3, 512), (groups, 6))
    )
    # Of 16 / bits runs of 64 channels, the k-th codes lie side by side.
    runs = codes.reshape(6, -1, 16 // bits, 64)
    words = np.stack([runs[:, :, :, k] for k in range(64)], axis=2).reshape(6, 512)
    stored = interleaved(jnp.asarray(codes), bits).astype(dtype)
    np.testing.assert_array_equal(stored.astype(int), words)
    np.testing.assert_array_equal(restored(stored, bits).astype(int), codes)
    found = few_rows_matmul(x, stored, scales=scales)
    expected = fused(x, codes, scales=scales)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_codes_of_qlora_are_those_of_the_product():
    """Fails if codes of a trained matrix need other scales than they have."""
    weights = jax.random.normal(jax.random.key(0), (32, 6))
    codes, scales = quantize_blocks(weights, 0, 8, "int8")
    x = jax.random.normal(jax.random.key(1), (2, 32))
    found = few_rows_matmul(x, codes.T, scales=scales)
    np.testing.assert_allclose(found, x @ weights, atol=0.05)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_options_are_computed_in_float32(activation, with_norm):
    rng = np.random.default_rng(0)
    x, weights, scale, residual = (
        jnp.float32(rng.normal(size=shape) * 2)
        for shape in ((3, 8), (8, 6), 8, (3, 3 if "glu" in activation else 6))
    )
    settings = dict(
        norm=(scale, 0.1) if with_norm else None,
        activation=activation,
        residual=residual,
    )
    found = few_rows_matmul(x, weights, **settings)
    np.testing.assert_allclose(found, fused(x, weights, **settings), rtol=2e-4)


UNSUPPORTED = {
    "it needs bfloat16 or float16 rows and x is float32; cast it": dict(
        dtype=jnp.float32
    ),
    "it needs 1 to 64 rows and x has 65; use x @ weights": dict(rows=65),
    "it needs 1 to 64 rows and x has 0; use x @ weights": dict(rows=0),
    "it needs multiples of 64 inputs and 64 outputs, not 64 and 96; pad them": dict(
        columns=96
    ),
    "it needs multiples of 64 inputs and 64 outputs, not 80 and 64; pad them": dict(
        depth=80
    ),
    "it needs multiples of 128 inputs and 64 outputs, not 64 and 64; pad them": dict(
        codes=jnp.int8, group=64
    ),
    "it needs multiples of 256 inputs and 64 outputs, not 128 and 64; pad them": dict(
        depth=128, codes=jnp.int4, group=64
    ),
    "it needs bfloat16 rows and x is float16; cast it": dict(
        depth=128, codes=jnp.int8, group=64, dtype=jnp.float16
    ),
    "it needs groups of 64 or 128 inputs, not 32; quantise again": dict(
        depth=128, codes=jnp.int8, group=32
    ),
    "it needs bfloat16 rows and x is float32; cast it": dict(
        depth=128, codes=jnp.float8_e4m3fn, group=64, dtype=jnp.float32
    ),
}


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_arrays_without_a_kernel_are_told(on_hopper, caplog, text):
    """`auto` takes the reference and logs the problem; `mosaic_gpu` refuses."""
    case = dict(rows=2, depth=64, columns=64, dtype=jnp.bfloat16, group=0)
    case |= UNSUPPORTED[text]
    rows, depth, columns = case["rows"], case["depth"], case["columns"]
    x, scales = jnp.ones((rows, depth), case["dtype"]), None
    weights = jnp.ones((depth, columns), case["dtype"])
    if case["group"]:
        weights = jnp.ones((columns, depth), case["codes"])
        scales = jnp.ones((depth // case["group"], columns))
    with value_error(
        f"implementation=mosaic_gpu cannot run: {text}, or use "
        "implementation='reference'"
    ):
        few_rows_matmul(x, weights, scales=scales, implementation="mosaic_gpu")
    device._log_choice.cache_clear()
    with caplog.at_level(logging.WARNING, "zjax_kernels"):
        found = few_rows_matmul(x, weights, scales=scales)
    problem = text.split(";")[0]
    assert caplog.messages == [f"product of few rows: reference ({problem})"]
    np.testing.assert_array_equal(np.float32(found), depth)


def test_arrays_that_do_not_fit_are_refused():
    x, weights = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((5, 3), jnp.float32)
    with value_error(
        "weights.shape=(5, 3) does not fit x of shape (2, 4); give (4, 3)\n"
        "weights.dtype=float32 is not the dtype of x, bfloat16; cast one"
    ):
        few_rows_matmul(x, weights)
    with value_error(
        "x.shape=(4,) does not have 2 dims; give [N, K]\n"
        "weights.shape=(1, 5, 3) does not have 2 dims; give [K, M]"
    ):
        few_rows_matmul(x[0], weights[None])
    with value_error("x.dtype=int32 is not of floats; cast the arrays"):
        few_rows_matmul(jnp.ones((2, 5), jnp.int32), jnp.ones((5, 3), jnp.int32))


def test_options_that_do_not_fit_are_refused():
    x, weights, values = jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.ones((4, 6))
    with value_error(
        "activation=silu is not an activation; use one of gelu, swiglu, geglu, "
        "clamped_swiglu, or none\n"
        "norm[1]=-1.0 is below 0; use 1e-5"
    ):
        few_rows_matmul(x, weights, activation="silu", norm=(x[0], -1.0))
    with value_error(
        "weights.shape=(4, 3) has no value for each gate; give twice the outputs"
    ):
        few_rows_matmul(x, weights, activation="swiglu")
    with value_error(
        "norm[0].shape=(2,) does not fit x of shape (2, 4); give (4,)\n"
        "residual.shape=(2, 6) does not fit x of shape (2, 4); give (2, 3)\n"
        "residual.dtype=bfloat16 is not the dtype of x, float32; cast one"
    ):
        few_rows_matmul(
            x,
            values,
            activation="geglu",
            norm=(jnp.ones(2), 1e-5),
            residual=jnp.ones((2, 6), jnp.bfloat16),
        )


def test_scales_that_do_not_fit_are_refused():
    x, codes = jnp.ones((2, 8)), jnp.ones((6, 8), jnp.int8)
    with value_error(
        "weights.shape=(6, 8) does not fit x of shape (2, 4); give (6, 4)\n"
        "scales.shape=(3, 6) does not scale codes of shape (6, 8); give (4 / group, 6)"
    ):
        few_rows_matmul(x[:, :4], codes, scales=jnp.ones((3, 6)))
    with value_error("scales.shape=(6,) does not have 2 dims; give [K / group, M]"):
        few_rows_matmul(x, codes, scales=jnp.ones(6))
    with value_error(
        "weights.dtype=float32 is not of codes; use int8 or int4 or float8_e4m3fn\n"
        "scales.dtype=int32 is not of floats; cast them"
    ):
        few_rows_matmul(x, jnp.ones((6, 8)), scales=jnp.ones((2, 6), jnp.int32))


def test_rows_that_cannot_be_rounded_are_refused():
    x, codes = jnp.ones((2, 8)), jnp.ones((6, 8), jnp.float8_e4m3fn)
    scales = jnp.ones((2, 6))
    with value_error("scales.shape=(2, 6) has several groups; give (1, 6)"):
        few_rows_matmul(x, codes, scales=scales, rounds_rows=True)
    for weights, given in (codes.astype(jnp.int8), scales[:1]), (x.T, None):
        with value_error(
            f"rounds_rows=True meets weights of {weights.dtype}, not codes of float8; "
            "leave it out"
        ):
            few_rows_matmul(x, weights, scales=given, rounds_rows=True)


def test_codes_of_float8_take_the_kernel(on_hopper):
    """Fails if codes are widened before a kernel reads them, or if it rounds rows."""
    make = jax.ShapeDtypeStruct
    x, codes = make((2, 128), jnp.bfloat16), make((64, 128), jnp.float8_e4m3fn)

    def multiply(x, codes, scales):
        return few_rows_matmul(x, codes, scales=scales)

    assert num_kernels(multiply, x, codes, make((1, 64), jnp.float32)) == 1
    with value_error(
        "implementation=mosaic_gpu cannot run: it multiplies rows as they are; leave "
        "out rounds_rows, or use implementation='reference'"
    ):
        arrays = jnp.ones(x.shape, x.dtype), jnp.ones(codes.shape, codes.dtype)
        few_rows_matmul(
            *arrays,
            scales=jnp.ones((1, 64)),
            rounds_rows=True,
            implementation="mosaic_gpu",
        )


def test_rows_of_float8_have_a_scale_each():
    """Fails if a loud row takes the bits of the others, or a row is not rounded."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.normal(size=(6, 8)), jnp.float8_e4m3fn)
    x, scales = (
        np.float32(rng.normal(size=(3, 8))),
        np.float32(rng.uniform(size=(1, 6))),
    )
    x *= np.float32([[1e-6], [1], [1e6]])
    found = few_rows_matmul(jnp.asarray(x), codes, scales=scales, rounds_rows=True)
    largest = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    rows = np.float32(np.asarray(x / largest, jnp.float8_e4m3fn)) * largest
    expected = np.float64(rows) @ np.float64(np.float32(codes)).T * scales
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    exact = np.float64(x) @ np.float64(np.float32(codes)).T * scales
    assert np.abs(found / exact - 1).max() > 1e-3


def test_no_device_is_refused():
    x = jnp.ones((1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU and this is cpu"):
        few_rows_matmul(x, jnp.ones((64, 64), x.dtype), implementation="mosaic_gpu")


def test_sharded_weights_run_anywhere():
    """Fails if the reference does not follow the sharding of output channels."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    spec = jax.sharding.PartitionSpec(None, "tensor")
    weights = jax.device_put(
        jnp.arange(8.0).reshape(2, 4), jax.sharding.NamedSharding(mesh, spec)
    )
    found = jax.jit(few_rows_matmul)(jnp.ones((1, 2)), weights)
    assert found.sharding.spec == spec
    np.testing.assert_array_equal(found, [[4.0, 6.0, 8.0, 10.0]])
