"""The GPU kernel of products: run by the interpreter, and lowered for CUDA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.decode.test_product import fused
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import cuda_program, num_kernels
from zjax_kernels import few_rows_matmul
from zjax_kernels.decode.product import mosaic_gpu
from zjax_kernels.decode.product.reference import (
    ACTIVATIONS,
    Operands,
    Options,
    interleaved,
)
from zjax_kernels.decode.product.tuning import Tuning, choose, step_depth
from zjax_kernels.warpgroups import HAS_EARLY_START

OLD_INTERPRETER = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this JAX's interpreter cannot transpose operands",
)
CASES = {
    "more steps than stages": dict(
        sizes=(3, 320, 128), tuning=Tuning(width=64, splits=1, stages=2)
    ),
    "wide tiles, rows beyond 8": dict(
        sizes=(9, 128, 256), tuning=Tuning(width=128, splits=1, stages=3)
    ),
    "one step": dict(
        sizes=(64, 64, 64),
        tuning=Tuning(width=64, splits=1, stages=4),
        dtype=jnp.float16,
    ),
    "a norm, gates and a residual": dict(
        sizes=(3, 192, 256),
        tuning=Tuning(width=64, splits=1, stages=2),
        activation="swiglu",
        normal=True,
        adds=True,
    ),
    "a norm and an activation": dict(
        sizes=(5, 128, 128),
        tuning=Tuning(width=128, splits=1, stages=2),
        activation="gelu",
        normal=True,
    ),
}
CASES |= {
    "codes of 8 bits": dict(
        sizes=(3, 384, 128), tuning=Tuning(64, splits=1, stages=2), codes=jnp.int8
    ),
    "codes of 8 bits, by column": dict(
        sizes=(9, 384, 128),
        tuning=Tuning(64, splits=1, stages=2),
        codes=jnp.int8,
        group=None,
        activation="swiglu",
        normal=True,
        adds=True,
    ),
    "codes of float8": dict(
        sizes=(3, 384, 128),
        tuning=Tuning(64, splits=1, stages=2),
        codes=jnp.float8_e4m3fn,
    ),
    "codes of float8, all": dict(
        sizes=(9, 256, 128),
        tuning=Tuning(64, splits=1, stages=2),
        codes=jnp.float8_e4m3fn,
        group=128,
        activation="geglu",
        normal=True,
        adds=True,
    ),
    "codes of 4 bits, a norm, gates": dict(
        sizes=(9, 512, 128),
        tuning=Tuning(64, splits=1, stages=2),
        codes=jnp.int4,
        group=128,
        activation="swiglu",
        normal=True,
    ),
}
INTERPRETED = CASES["more steps than stages"]["tuning"]


def make_case(
    sizes,
    *,
    dtype=jnp.bfloat16,
    activation="",
    normal=False,
    adds=False,
    codes=None,
    group=64,
):
    """Operands, options, and what they make in NumPy."""
    rng, (rows, depth, columns) = np.random.default_rng(0), sizes
    options = Options(eps=0.1 * normal, activation=activation)
    outputs = columns // options.num_parts
    shapes = (rows, depth), (depth, columns), (depth,), (rows, outputs)
    scales = 1, depth**-0.5, 1, 1
    x, weights, norm, residual = (
        jnp.asarray(rng.normal(size=shape) * scale, dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    )
    operands = Operands(
        x,
        weights,
        norm=norm if normal else None,
        residual=residual if adds else None,
    )
    if codes is not None:
        weights = rng.integers(-8, 8, size=(columns, depth))
        if jnp.issubdtype(codes, jnp.floating):
            # Also numbers near 0, of which few bits are left, and the largest.
            weights = rng.normal(size=weights.shape) * 2.0 ** rng.integers(
                -12, 3, size=weights.shape
            )
            weights[0, :2] = 448, -448
        scales = rng.uniform(0.01, 0.02, size=(depth // (group or depth), columns))
        weights = stored = jnp.asarray(weights, codes)
        if jnp.issubdtype(codes, jnp.integer):
            stored = interleaved(weights, jnp.iinfo(codes).bits)
        operands = operands._replace(weights=stored, scales=jnp.float32(scales))
    expected = fused(
        x,
        weights,
        scales=operands.scales,
        norm=(norm, 0.1) if normal else None,
        activation=activation,
        residual=operands.residual,
    )
    return operands, options, expected


def interpret(operands, options, *, tuning=INTERPRETED):
    run = functools.partial(
        mosaic_gpu.few_rows_matmul,
        options=options,
        tuning=tuning,
        interpret=InterpretGPUParams(detect_races=True),
    )
    return np.float32(jax.jit(run)(operands))


@OLD_INTERPRETER
@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_what_numpy_does(capfd, name):
    """Fails if the kernel leaves out, adds or races for anything."""
    settings = dict(CASES[name])
    tuning = settings.pop("tuning")
    operands, options, expected = make_case(**settings)
    found = interpret(operands, options, tuning=tuning)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
@pytest.mark.parametrize("normal", [False, True])
def test_a_row_does_not_depend_on_other_rows(normal):
    """Fails if a row changes by a bit where others are NaN, or are not there."""
    operands, options, _ = make_case((5, 256, 64), normal=normal)
    found = interpret(operands, options)
    others = operands._replace(x=operands.x.at[1:].set(jnp.nan))
    np.testing.assert_array_equal(found[0], interpret(others, options)[0])
    alone = operands._replace(x=operands.x[:1])
    np.testing.assert_array_equal(found[:1], interpret(alone, options))


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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 4096, 4096), (16, 11008, 8192), (64, 256, 128)]
)
def test_every_option_lowers_for_cuda(on_hopper, activation, rows, depth, columns):
    """Fails if an option needs another kernel, or what Mosaic cannot do."""
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    outputs = columns // Options(activation=activation).num_parts

    def run(x, weights, scale, residual):
        return few_rows_matmul(
            x, weights, norm=(scale, 1e-5), activation=activation, residual=residual
        )

    shapes = (rows, depth), (depth, columns), (depth,), (rows, outputs)
    assert num_kernels(run, *map(make, shapes)) == 1


@pytest.mark.parametrize("early", [False, True])
def test_early_kernels_wait_for_the_kernels_before(on_hopper, early):
    """Fails if a kernel never starts early, or starts so without being asked."""
    x = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    text = cuda_program(functools.partial(few_rows_matmul, early=early), x, weights)
    assert ("griddepcontrol.wait" in text) == (early and HAS_EARLY_START)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "group", "activation"),
    [
        (1, 4096, 4096, 128, ""),
        (8, 4096, 22016, 64, "swiglu"),
        (64, 11008, 4096, 128, ""),
    ],
)
def test_codes_lower_for_cuda(
    on_hopper, rows, depth, columns, group, activation, dtype
):
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    codes = jax.ShapeDtypeStruct((columns, depth), dtype)
    scales = jax.ShapeDtypeStruct((depth // group, columns), jnp.bfloat16)

    def run(x, codes, scales):
        norm = x[0], 1e-5
        return few_rows_matmul(
            x,
            codes,
            scales=scales,
            norm=norm,
            activation=activation,
            implementation="mosaic_gpu",
        )

    assert num_kernels(run, x, codes, scales) == 1


CODES_BY_ROWS = [*itertools.product((jnp.int8, jnp.int4), (1, 64, 128))]


@pytest.mark.parametrize("depth", [64, 1600, 4096, 11008])
@pytest.mark.parametrize("columns", [64, 4096, 4800, 22016, 128256])
def test_tunings_fill_the_device(depth, columns):
    kinds = (jnp.bfloat16, 1), (jnp.bfloat16, 64), *CODES_BY_ROWS
    for dtype, rows in kinds:
        tuning = choose(rows, depth, columns, dtype=dtype)
        assert columns % tuning.width == 0
        assert 1 <= tuning.splits <= max(1, depth // step_depth(dtype))
        assert tuning.stages >= (3 if dtype == jnp.bfloat16 else 2)
