"""Grouped products against a loop over groups, and copies of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax_kernels import (
    copy_rows,
    grouped_activation_backward,
    grouped_matmul,
    grouped_outer,
)
from zjax_kernels.grouped import mosaic_gpu, reference
from zjax_kernels.grouped.reference import num_parts

SIZES = {
    "even": [8, 8, 8, 8],
    "uneven": [1, 19, 3, 9],
    "empty": [0, 0, 32, 0],
    "rows without a group": [3, 0, 5, 4],
    "nothing": [0, 0, 0, 0],
}


def operands(num_rows=32, groups=4, k=6, n=5):
    rng = np.random.default_rng(0)
    shapes = (num_rows, k), (groups, k, n), (num_rows, n)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def loop(x, weights, sizes):
    """[M, N] by one product for each group."""
    out, start = np.zeros((len(x), weights.shape[2]), np.float32), 0
    for matrix, size in zip(weights, sizes, strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


def loop_outer(x, y, sizes):
    ends = np.cumsum(sizes)
    pairs = zip(ends - sizes, ends, strict=True)
    return np.stack([x[a:b].T @ y[a:b] for a, b in pairs])


@pytest.mark.parametrize("tile_rows", [128, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_are_those_of_a_loop(monkeypatch, sizes, tile_rows):
    monkeypatch.setattr(reference, "TILE_ROWS", tile_rows)
    x, weights, cotangent = operands()
    given = jnp.array(sizes, jnp.int32)
    out, pull = jax.vjp(lambda *args: grouped_matmul(*args, given), x, weights)
    of_x, of_weights = pull(cotangent)
    arrays = [np.asarray(a) for a in (x, weights, cotangent)]
    np.testing.assert_allclose(out, loop(*arrays[:2], sizes), atol=2e-6)
    transposed = arrays[1].transpose(0, 2, 1)
    np.testing.assert_allclose(of_x, loop(arrays[2], transposed, sizes), atol=2e-6)
    expected = loop_outer(arrays[0], arrays[2], sizes)
    np.testing.assert_allclose(of_weights, expected, atol=4e-6)


def clamped(gate, value):
    """As written down for gpt-oss."""
    gate, value = jnp.minimum(gate, 7.0), jnp.clip(value, -7.0, 7.0)
    return (value + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS = {
    "swiglu": lambda x: jax.nn.silu(x[:, :3]) * x[:, 3:],
    "clamped_swiglu": lambda x: clamped(x[:, :3], x[:, 3:]),
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    None: lambda x: x,
}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_biases_and_activations_are_applied_and_differentiated(activation, transpose):
    sizes = SIZES["rows without a group"]
    x, weights, cotangent = operands(n=6)
    bias = cotangent[:4] / 2
    group = jnp.repeat(jnp.arange(4), jnp.array(sizes))

    def loss(run, *args):
        out = run(*args)
        return (out[: sum(sizes)] * cotangent[: sum(sizes), : out.shape[1]]).sum()

    def expect(x, weights, bias):
        products = jnp.einsum("mk,mkn->mn", x[: sum(sizes)], weights[group])
        return ACTIVATIONS[activation](products + bias[group])

    def run(x, weights, bias):
        weights = weights.swapaxes(1, 2) if transpose else weights
        return grouped_matmul(
            x,
            weights,
            jnp.array(sizes),
            bias=bias,
            activation=activation,
            transpose=transpose,
        )

    def differentiate(run):
        return jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1, 2)))

    found, expected = (differentiate(each)(x, weights, bias) for each in (run, expect))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu", "relu"])
def test_a_backward_pass_is_that_of_the_scaled_product(activation):
    sizes = jnp.array(SIZES["rows without a group"])
    x, weights, inputs = operands(k=6, n=6)
    weights = weights[:, : 6 // num_parts(activation)]
    scale = jnp.linspace(-1, 2, len(x))

    def product(inputs, scale, weights):
        activated = ACTIVATIONS[activation](inputs)
        return scale[:, None] * grouped_matmul(activated, weights, sizes)

    _, pull = jax.vjp(product, inputs, scale, weights)
    of_inputs, of_scale, of_weights = pull(x)
    found = grouped_activation_backward(
        x, weights, sizes, inputs, scale, activation=activation
    )
    np.testing.assert_allclose(found[0], of_inputs, atol=1e-5)
    np.testing.assert_allclose(found[2], of_scale, atol=1e-5)
    outer = grouped_outer(found[1], x, sizes)
    np.testing.assert_allclose(outer, of_weights, rtol=1e-5, atol=1e-5)


def test_many_groups():
    x, weights, _ = operands(num_rows=700, groups=512)
    sizes = np.random.default_rng(1).multinomial(700, np.ones(512) / 512)
    found = grouped_matmul(x, weights, jnp.asarray(sizes, jnp.int32))
    expected = loop(np.asarray(x), np.asarray(weights), sizes)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_what_is_not_finite_stays_in_its_group():
    x, weights, cotangent = operands()
    x = x.at[0].set(jnp.nan)
    sizes = jnp.array([1, 19, 3, 9])
    out, pull = jax.vjp(lambda w: grouped_matmul(x, w, sizes), weights)
    (of_weights,) = pull(cotangent)
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1:]).all()
    assert jnp.isnan(of_weights[0]).all()
    assert jnp.isfinite(of_weights[1:]).all()


def test_sums_of_bfloat16_are_in_float32():
    x = jnp.ones((2, 4096), jnp.bfloat16)
    weights = jnp.full((1, 4096, 1), 1 / 4096, jnp.bfloat16)
    found = grouped_matmul(x, weights, jnp.array([2]))
    assert (found.dtype, float(found[0, 0])) == (jnp.bfloat16, 1.0)


def test_memory_is_of_the_order_of_the_operands():
    """Fails if every row is multiplied by every matrix, or each tile has its own."""
    shapes = ((1024, 64), (64, 64, 32))
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    sizes = jax.ShapeDtypeStruct((64,), "int32")

    def loss(x, weights, sizes):
        return grouped_matmul(x, weights, sizes).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args, sizes).compile()
    operands = 4 * (1024 * 64 + 64 * 64 * 32 + 1024 * 32)
    assert program.memory_analysis().temp_size_in_bytes < 4 * operands


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (
            ((8, 4), (2, 3, 5), (2,)),
            ("float32", "float32", "int32"),
            "weights.shape=(2, 3, 5) does not fit x of shape (8, 4); give [M, K] and "
            "[groups, K, N]",
        ),
        (
            ((8, 4), (2, 4, 5), (3,)),
            ("float32", "float32", "int32"),
            "sizes.shape=(3,) does not fit 2 matrices; give one for each",
        ),
        (
            ((8, 4), (2, 4, 5), (2,)),
            ("float32", "bfloat16", "float32"),
            "sizes.dtype=float32 is not of integers; count rows in int32\n"
            "weights.dtype=bfloat16 does not fit x of float32; cast both to one "
            "floating-point dtype",
        ),
    ],
)
def test_operands_that_do_not_match_are_refused(shapes, dtypes, message):
    args = [jnp.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    with value_error(message):
        grouped_matmul(*args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bias": jnp.zeros((2, 4)), "activation": "tanh"},
            "bias=float32[2, 4] does not fit the products; give float32[2, 5], a row "
            "for each group\n"
            "activation=tanh is not an activation; use one of swiglu, clamped_swiglu, "
            "gelu, relu",
        ),
        (
            {"activation": "swiglu"},
            "activation=swiglu does not halve 5 columns; give matrices with the "
            "columns of gates and values",
        ),
    ],
)
def test_epilogues_that_do_not_fit_are_refused(settings, message):
    x, weights, sizes = jnp.zeros((8, 4)), jnp.zeros((2, 4, 5)), jnp.array([1, 2])
    with value_error(message):
        grouped_matmul(x, weights, sizes, **settings)


def row_operands(num_tokens, num_copies=2, num_rows=None, width=128):
    """Rows in a random order; those beyond `num_rows` are left out."""
    rng = np.random.default_rng(0)
    places = rng.permutation(num_tokens * num_copies).astype(np.int32)
    sources = np.argsort(places).astype(np.int32) // num_copies
    x = jnp.asarray(rng.normal(size=(num_tokens, width)), jnp.bfloat16)
    targets = jnp.asarray(places.reshape(num_tokens, num_copies))
    return x, jnp.asarray(sources[:num_rows]), targets


def test_the_kernel_copies_each_row_to_its_places(capfd, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.rows, "_BATCH_BYTES", 512)
    x, sources, targets = row_operands(num_tokens=24, num_rows=40)
    run = functools.partial(
        mosaic_gpu.copy_rows, interpret=InterpretGPUParams(detect_races=True)
    )
    found = jax.jit(run)(x, sources, targets)
    np.testing.assert_array_equal(found, x[sources])
    np.testing.assert_array_equal(found, copy_rows(x, sources, targets))
    assert "RACE" not in "".join(capfd.readouterr())


def test_rows_need_not_fill_the_last_batch(monkeypatch):
    """It copies rows of the batch before again, which the interpreter calls a race."""
    monkeypatch.setattr(mosaic_gpu.rows, "_BATCH_BYTES", 1024)
    x, sources, targets = row_operands(num_tokens=7)
    run = functools.partial(mosaic_gpu.copy_rows, interpret=InterpretGPUParams())
    np.testing.assert_array_equal(jax.jit(run)(x, sources, targets), x[sources])


@pytest.mark.parametrize("width", [128, 4096, 32768])
def test_rows_of_every_width_lower_for_cuda(width):
    arrays = row_operands(num_tokens=20, width=width)
    assert num_kernels(mosaic_gpu.copy_rows, *arrays) == 1


def test_rows_with_many_places_are_gathered(on_hopper):
    x, sources, targets = row_operands(num_tokens=4, num_copies=17)
    np.testing.assert_array_equal(copy_rows(x, sources, targets), x[sources])
    with pytest.raises(ValueError, match="at most 16 places of a row, not 17; gather"):
        copy_rows(x, sources, targets, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (
            64,
            "bfloat16",
            "it needs rows of 128, 256, ... 32768 numbers, not (8, 64); pad or split",
        ),
        (128, "float32", "it needs bfloat16 or float16 and the rows are float32; cast"),
    ],
)
def test_what_the_kernel_cannot_copy_is_refused(on_hopper, width, dtype, message):
    x, sources, targets = row_operands(num_tokens=8, width=width)
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message} them, or use "
        "implementation='reference'"
    ):
        copy_rows(x.astype(dtype), sources, targets, implementation="mosaic_gpu")
