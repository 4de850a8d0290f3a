"""The GPU kernel of products: run by the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from zjax_kernels import few_rows_matmul
from zjax_kernels.decode.product import mosaic_gpu
from zjax_kernels.decode.product.tuning import Tuning, choose

OLD_INTERPRETER = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this JAX's interpreter cannot transpose operands",
)
CASES = {
    "more steps than stages": (3, 320, 128, Tuning(width=64, splits=1, stages=2)),
    "uneven splits": (8, 320, 64, Tuning(width=64, splits=3, stages=2)),
    "wide tiles, rows beyond 8": (9, 128, 256, Tuning(width=128, splits=1, stages=3)),
    "one step": (64, 64, 64, Tuning(width=64, splits=1, stages=4)),
}


def make_case(rows, depth, columns, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (rows, depth), (depth, columns)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def interpret(tuning, *arrays):
    run = functools.partial(
        mosaic_gpu.few_rows_matmul,
        tuning=tuning,
        interpret=InterpretGPUParams(detect_races=True),
    )
    return np.float32(jax.jit(run)(*arrays))


@OLD_INTERPRETER
@pytest.mark.parametrize("name", CASES)
def test_kernel_multiplies_rows_by_columns(capfd, name):
    """Fails if the kernel leaves out, adds or races for anything."""
    *sizes, tuning = CASES[name]
    x, weights = make_case(*sizes, jnp.float16 if "one" in name else jnp.bfloat16)
    found = interpret(tuning, x, weights)
    expected = np.float64(x) @ np.float64(weights)
    np.testing.assert_allclose(found, expected, rtol=8e-3, atol=2e-2)
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
def test_a_row_does_not_depend_on_other_rows():
    """Fails if a row changes by a bit where others are NaN, or are not there."""
    tuning = Tuning(width=64, splits=2, stages=2)
    x, weights = make_case(5, 256, 64)
    found = interpret(tuning, x, weights)
    others = interpret(tuning, x.at[1:].set(jnp.nan), weights)
    np.testing.assert_array_equal(found[0], others[0])
    np.testing.assert_array_equal(found[:1], interpret(tuning, x[:1], weights))


@pytest.mark.parametrize("rows", [1, 8, 17, 64])
@pytest.mark.parametrize(
    ("depth", "columns"),
    [(4096, 12288), (4096, 4096), (11008, 4096), (4096, 128256), (1600, 4800)],
)
def test_every_shape_lowers_for_cuda(on_hopper, rows, depth, columns):
    """Fails if the kernel asks for what Mosaic cannot do: copies, layouts, memory."""
    dtype = jnp.float16 if rows == 8 else jnp.bfloat16
    x = jax.ShapeDtypeStruct((rows, depth), dtype)
    weights = jax.ShapeDtypeStruct((depth, columns), dtype)
    assert num_kernels(few_rows_matmul, x, weights) == 1


@pytest.mark.parametrize("depth", [64, 1600, 4096, 11008])
@pytest.mark.parametrize("columns", [64, 4096, 4800, 22016, 128256])
def test_tunings_fill_the_device(depth, columns):
    tuning = choose(1, depth, columns)
    assert columns % tuning.width == 0
    assert 1 <= tuning.splits <= depth // 64
    assert tuning.stages >= 4
