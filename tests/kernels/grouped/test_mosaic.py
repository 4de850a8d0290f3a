"""The GPU kernels: run by the interpreter with races detected, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax_kernels import grouped_matmul, grouped_outer
from zjax_kernels.grouped import mosaic_gpu, reference
from zjax_kernels.grouped.mosaic_gpu import activation as derivatives
from zjax_kernels.grouped.mosaic_gpu.pipeline import TILE_ROWS
from zjax_kernels.grouped.mosaic_gpu.product import _cover
from zjax_kernels.grouped.reference import activate, num_parts
from zjax_kernels.grouped.tuning import Tuning

K, N = 128, 192
OLD_INTERPRETER = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this JAX's interpreter cannot transpose operands",
)
SIZES = {
    "each with its own tile": [128, 0, 7, 100],
    "one row and less than half a tile": [1, 33, 64, 65],
    "nothing": [0, 0, 0, 0],
}
SHARED = {"two tiles of the same rows": [130, 0, 5, 150]}
"""Both write the same numbers, which the interpreter reports as a race."""


def operands(sizes):
    """Also a tile of rows without a group, as old interpreters read no further."""
    rng, rows = np.random.default_rng(0), sum(sizes) + TILE_ROWS
    shapes = (rows, K), (len(sizes), K, N), (rows, N)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    return *arrays, jnp.asarray(sizes, jnp.int32)


def interpret(kernel, *arrays, stages=2, columns=64, **settings):
    run = functools.partial(
        kernel,
        tuning=Tuning(tile_columns=columns, stages=stages, band=2),
        interpret=InterpretGPUParams(detect_races=True),
        **settings,
    )
    return jax.jit(run)(*arrays)


def interpret_sum(*arrays):
    interpreter = InterpretGPUParams(detect_races=True)
    run = functools.partial(mosaic_gpu.grouped_sum, interpret=interpreter)
    return jax.jit(run)(*arrays)


def assert_close(found, expected):
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("sizes", [*SIZES.values(), *SHARED.values()])
def test_products_are_those_of_the_reference(capfd, sizes):
    x, weights, _, sizes_array = operands(sizes)
    found = interpret(mosaic_gpu.grouped_matmul, x, weights, sizes_array)
    assert_close(found, reference.grouped_matmul(x, weights, sizes_array))
    assert not found[sum(sizes) :].any()
    if sizes not in SHARED.values():
        assert "RACE" not in "".join(capfd.readouterr())


def test_a_tile_is_stored_while_rows_of_the_one_before_are(capfd):
    """Fails if both use the same buffer."""
    x, _, _, sizes = operands([3, 128])
    weights = jnp.ones((2, K, 128), x.dtype)
    found = interpret(mosaic_gpu.grouped_matmul, x, weights, sizes, columns=128)
    assert_close(found, reference.grouped_matmul(x, weights, sizes))
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_are_those_of_the_reference(capfd, sizes):
    x, weights, y, sizes_array = operands(sizes)
    found = interpret(
        mosaic_gpu.grouped_matmul, y, weights, sizes_array, transpose=True
    )
    expected = reference.grouped_matmul(y, weights, sizes_array, transpose=True)
    assert_close(found, expected)
    found = interpret(mosaic_gpu.grouped_outer, x, y, sizes_array, stages=3)
    assert_close(found, reference.grouped_outer(x, y, sizes_array))
    assert not found[np.asarray(sizes) == 0].any()
    scale = jnp.abs(x[:, 0])
    found = interpret_sum(y, sizes_array, scale)
    assert_close(found, reference.grouped_sum(y, sizes_array, scale))
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
def test_rows_need_not_fill_the_last_tile():
    x, _, y, sizes = operands([30, 21])
    rows = 51
    found = interpret(mosaic_gpu.grouped_outer, x[:rows], y[:rows], sizes)
    assert_close(found, reference.grouped_outer(x[:rows], y[:rows], sizes))


@pytest.mark.parametrize("parts", [(np.nan, 1.0), (1.0, np.nan)])
def test_numbers_that_are_not_finite_stay_so_where_inputs_are_clamped(parts):
    """Fails if a kernel replaces NaN by the bound, and a step looks finite."""
    parts = tuple(map(jnp.float32, parts))
    assert jnp.isnan(derivatives.activate("clamped_swiglu", parts))
    value, _ = derivatives.differentiate("clamped_swiglu", parts, jnp.float32(1.0))
    assert jnp.isnan(value)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu", "relu"])
def test_derivatives_in_registers_are_those_of_jax(activation):
    rng, parts = np.random.default_rng(0), num_parts(activation)
    size = np.append(np.full(200, 5.0), np.full(200, 90.0))
    inputs = [
        jnp.float32(size * rng.uniform(-1, 1, 400))[:, None] for _ in range(parts)
    ]
    cotangent = jnp.float32(rng.normal(size=(400, 1)))
    joined = jnp.concatenate(inputs, axis=1)
    expected, pull = jax.vjp(functools.partial(activate, activation), joined)
    found, gradients = derivatives.differentiate(activation, inputs, cotangent)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
    close(found, expected)
    close(derivatives.activate(activation, inputs), expected)
    close(jnp.concatenate(gradients, axis=1), *pull(cotangent))


def interpret_forward(activation, sizes, **settings):
    x, _, _, sizes_array = operands(sizes)
    rng, columns = np.random.default_rng(1), 128 * num_parts(activation)
    shapes = (len(sizes), K, columns), (len(sizes), columns)
    weights, bias = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    arrays = x, weights * 0.1, sizes_array, bias
    run = functools.partial(mosaic_gpu.grouped_activation, activation=activation)
    found = interpret(run, *arrays, columns=128, **settings)
    expected = reference.grouped_activation(*arrays, activation=activation, **settings)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
        assert not one[sum(sizes) :].any()


def test_activations_and_biases_are_those_of_the_reference(capfd):
    sizes = SIZES["one row and less than half a tile"]
    interpret_forward("swiglu", sizes)
    interpret_forward("clamped_swiglu", sizes, saves=False)
    interpret_forward("gelu", sizes, saves=False)
    assert "RACE" not in "".join(capfd.readouterr())


EPILOGUES = {
    "swiglu": ("swiglu", SIZES["one row and less than half a tile"]),
    "swiglu, two tiles of the same rows": ("swiglu", *SHARED.values()),
    "gelu": ("gelu", SIZES["each with its own tile"]),
    "relu": ("relu", SIZES["nothing"]),
}


@OLD_INTERPRETER
@pytest.mark.parametrize(("activation", "sizes"), EPILOGUES.values(), ids=EPILOGUES)
def test_gradients_of_activations_are_those_of_the_reference(capfd, activation, sizes):
    x, _, _, sizes_array = operands(sizes)
    rng, rows = np.random.default_rng(1), len(x)
    shapes = (len(sizes), 128, K), (rows, 128 * num_parts(activation)), (rows,)
    weights, inputs, scale = (jnp.asarray(rng.normal(size=s)) for s in shapes)
    weights, inputs = (0.1 * weights).astype(x.dtype), inputs.astype(x.dtype)
    found = interpret(
        mosaic_gpu.grouped_activation_backward,
        *(x, weights, sizes_array, inputs, scale.astype(jnp.float32)),
        columns=128,
        activation=activation,
    )
    x, weights, inputs = (each.astype(jnp.float32) for each in (x, weights, inputs))
    expected = reference.grouped_activation_backward(
        x, weights, sizes_array, inputs, scale, activation=activation
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    if sizes not in SHARED.values():
        assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("sizes", [*SIZES.values(), *SHARED.values()])
def test_tiles_cover_each_row_and_keep_to_their_group(sizes):
    num_rows = sum(sizes) + 150
    group, start, rows, count = _cover(jnp.asarray(sizes, jnp.int32), num_rows)
    all_sizes = np.append(sizes, 150)
    of_row = np.repeat(np.arange(len(all_sizes)), all_sizes)
    covered = np.zeros(num_rows, bool)
    for i in range(int(count[0])):
        tile = slice(int(start[i]), int(start[i] + rows[i]))
        assert (of_row[tile] == int(group[i])).all()
        assert 0 < rows[i] <= TILE_ROWS
        covered[tile] = True
    assert covered.all()


def lowered_kernels(function, *shapes, dtype=jnp.bfloat16, more=()):
    """Kernels of a function of arrays, the sizes of groups, and `more` arrays."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:-1]]
    sizes = jax.ShapeDtypeStruct(shapes[-1], jnp.int32)
    return num_kernels(function, *arrays, sizes, *more)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("transpose", [False, True])
def test_every_variant_lowers_for_cuda(transpose, width, dtype):
    """Fails if a kernel asks for what Mosaic cannot do: copies, layouts, memory."""
    matrices = (512, 768, 256) if transpose else (512, 256, 768)
    tuning = Tuning(tile_columns=width)
    run = functools.partial(
        mosaic_gpu.grouped_matmul, transpose=transpose, tuning=tuning
    )
    assert lowered_kernels(run, (1000, 256), matrices, (512,), dtype=dtype) == 1
    run = functools.partial(mosaic_gpu.grouped_outer, tuning=tuning)
    assert lowered_kernels(run, (1001, 256), (1001, 768), (512,), dtype=dtype) == 1


@pytest.mark.parametrize(
    ("activation", "width"), [("swiglu", 64), ("swiglu", 256), ("gelu", 256)]
)
def test_every_epilogue_lowers_for_cuda(activation, width):
    """The default tuning, too, which must leave memory for what an epilogue reads."""
    tuning, parts = Tuning(tile_columns=width), num_parts(activation)
    settings = {"activation": activation, "tuning": tuning}
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x, sizes = (1000, 256), (512,)
    run = functools.partial(mosaic_gpu.grouped_activation, **settings)
    matrices, bias = (512, 256, parts * 768), make((512, parts * 768))
    assert lowered_kernels(run, x, matrices, sizes, more=[bias]) == 1
    run = functools.partial(mosaic_gpu.grouped_activation_backward, **settings)
    scale = jax.ShapeDtypeStruct((1000,), jnp.float32)
    more = make((1000, parts * 768)), scale
    assert lowered_kernels(run, x, (512, 768, 256), sizes, more=more) == 1
    run = functools.partial(mosaic_gpu.grouped_matmul, tuning=tuning)
    assert lowered_kernels(run, x, matrices, sizes, more=[bias]) == 1


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_run_kernels_without_transposed_copies(on_hopper, transpose):

    def loss(x, weights, sizes):
        out = grouped_matmul(x, weights, sizes, transpose=transpose)
        return out.astype(jnp.float32).sum()

    matrices = (4, 384, 256) if transpose else (4, 256, 384)
    gradient = jax.grad(loss, argnums=(0, 1))
    assert lowered_kernels(gradient, (512, 256), matrices, (4,)) == 2
    assert lowered_kernels(loss, (512, 256), matrices, (4,)) == 1


def test_what_kernels_cannot_run_is_refused_by_name(on_hopper):
    x, weights, y, sizes = operands([10, 20])
    with value_error(
        "implementation=mosaic_gpu cannot run: it needs rows, and matrices with sides "
        "of 128, 256, ..., not (128, 192); pad them, or use implementation='reference'"
    ):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")
    wide = (each.astype(jnp.float32) for each in (x, y))
    with value_error(
        "implementation=mosaic_gpu cannot run: it needs bfloat16 or float16 and the "
        "arrays are float32; cast them, or use implementation='reference'"
    ):
        grouped_outer(*wide, sizes, implementation="mosaic_gpu")
