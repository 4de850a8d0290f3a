"""The GPU kernels of experts: run by the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_experts import add_up, assert_chosen, choose
from tests.kernels.decode.test_product_mosaic import OLD_INTERPRETER
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import cuda_program, num_kernels
from zjax_kernels import Choice, choose_experts, few_rows_experts, lay_router
from zjax_kernels.decode.experts import mosaic_gpu
from zjax_kernels.decode.experts.reference import (
    ExpertOperands,
    RouterOperands,
    RouterOptions,
)
from zjax_kernels.decode.experts.tuning import choose_router
from zjax_kernels.decode.product.reference import Options
from zjax_kernels.decode.product.tuning import Tuning
from zjax_kernels.warpgroups import HAS_EARLY_START


def draw(*shape, seed=0, scale=1.0, dtype=jnp.bfloat16):
    values = scale * np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, dtype)


def interpret(run, *arrays, **given):
    """Runs a kernel under the interpreter."""
    run = functools.partial(run, interpret=InterpretGPUParams(detect_races=True))
    return jax.jit(functools.partial(run, **given))(*arrays)


ROUTERS = {
    "softmax": dict(rows=3, experts=8, top_k=2),
    "many experts": dict(rows=9, experts=72, top_k=8, depth=192),
    "16 bits": dict(rows=1, experts=64, top_k=1, kernel=jnp.bfloat16),
    "sigmoid, biases and padding": dict(
        rows=5,
        experts=80,
        top_k=3,
        scores="sigmoid",
        scale=2.5,
        bias=draw(80, seed=3, dtype=jnp.float32),
        logit_bias=draw(80, seed=4, dtype=jnp.float32),
        counts=jnp.arange(5) != 2,
    ),
    "nothing but padding": dict(
        rows=2, experts=8, top_k=2, counts=jnp.zeros(2, bool), normalise=False
    ),
    "a norm": dict(
        rows=2, experts=8, top_k=2, norm=(1 + draw(128, seed=5, scale=0.1), 0.1)
    ),
}


@OLD_INTERPRETER
@pytest.mark.parametrize("name", ROUTERS)
def test_kernel_chooses_as_numpy_does(capfd, name):
    """Fails if the kernel lists an expert twice, or reads what fills up a tile."""
    case = dict(depth=128, kernel=jnp.float32, norm=None) | ROUTERS[name]
    rows, experts, depth = (case.pop(key) for key in ("rows", "experts", "depth"))
    x, kernel = draw(rows, depth), draw(depth, experts, seed=1, dtype=jnp.float32)
    kernel = (kernel * 0.1).astype(case.pop("kernel"))
    if case["norm"]:
        # The kernel rounds rows before it divides them: by a power of 2, nothing is
        # lost.
        x = jnp.sign(x).astype(x.dtype)
        case["norm"] = jnp.ones(depth, x.dtype), 3.0
    matrix = lay_router(kernel, x.dtype)
    arrays = {key: case.get(key) for key in ("bias", "logit_bias", "counts")}
    numbers = {key: value for key, value in case.items() if key not in arrays}
    norm, eps = numbers.pop("norm") or (None, 0.0)
    operands = RouterOperands(x, matrix, **arrays, norm=norm)
    options = RouterOptions(experts, eps=eps, **numbers)
    tuning = Tuning(options.columns, splits=1, stages=2)
    found = interpret(
        mosaic_gpu.choose_experts, operands, options=options, tuning=tuning
    )
    given = {key: value for key, value in case.items() if value is not None}
    assert_chosen(found, choose(x, kernel, **given))
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
def test_kernel_takes_the_first_of_equal_experts():
    x, matrix = jnp.ones((2, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    found = interpret(
        mosaic_gpu.choose_experts,
        RouterOperands(x, matrix),
        options=RouterOptions(9, 3),
        tuning=Tuning(64, splits=1, stages=2),
    )
    assert_chosen(found, np.array([[1 / 3] * 3 + [0.0] * 6] * 2))


EXPERTS = {
    "gates and a residual": dict(rows=3, sizes=(8, 128, 64, 128), adds=True),
    "more rows than 8, no gates": dict(
        rows=9, sizes=(5, 64, 128, 64), top_k=1, activation="gelu"
    ),
    "a norm": dict(rows=2, sizes=(16, 128, 64, 64), top_k=3, normal=True, adds=True),
    "clamped gates": dict(rows=1, sizes=(4, 64, 192, 64), activation="clamped_swiglu"),
    "biases": dict(
        rows=2, sizes=(4, 64, 64, 64), activation="clamped_swiglu", has_biases=True
    ),
}


def make_case(
    rows,
    sizes,
    *,
    top_k=2,
    activation="swiglu",
    normal=False,
    adds=False,
    has_biases=False,
    dtype=jnp.bfloat16,
):
    """Operands, weights of experts, options, and what they make in NumPy."""
    experts, depth, hidden, columns = sizes
    options = Options(eps=0.1 * normal, activation=activation)
    inputs = experts, depth, hidden * options.num_parts
    operands = ExpertOperands(
        draw(rows, depth, dtype=dtype),
        draw(*inputs, seed=1, scale=depth**-0.5, dtype=dtype),
        draw(experts, hidden, columns, seed=2, scale=hidden**-0.5, dtype=dtype),
        draw(depth, seed=3, dtype=dtype) if normal else None,
        draw(rows, columns, seed=4, dtype=dtype) if adds else None,
        draw(experts, inputs[2], seed=6, dtype=dtype) if has_biases else None,
        draw(experts, columns, seed=7, dtype=dtype) if has_biases else None,
    )
    rng, gates = np.random.default_rng(5), np.zeros((rows, experts), np.float32)
    for row in gates:
        row[rng.choice(experts, top_k, replace=False)] = rng.uniform(0.1, 1, top_k)
    norm = (operands.norm, options.eps) if normal else None
    arrays = operands.x, gates, operands.up, operands.down
    expected = add_up(
        *arrays,
        activation=activation,
        norm=norm,
        residual=operands.residual,
        up_bias=operands.up_bias,
        down_bias=operands.down_bias,
    )
    return operands, gates, options, expected


def run_kernel(operands, gates, options):
    most = gates.size if len(gates) == 1 else gates.shape[1]
    return np.float32(
        interpret(
            mosaic_gpu.few_rows_experts,
            operands,
            Choice.of(jnp.asarray(gates.T), most),
            options=options,
            tunings=(Tuning(64, splits=1, stages=2), Tuning(64, splits=1, stages=3)),
        )
    )


@OLD_INTERPRETER
@pytest.mark.parametrize("name", EXPERTS)
def test_kernels_add_up_as_numpy_does(capfd, name):
    """Fails if the kernels read the matrix of another expert, or race for anything."""
    operands, gates, options, expected = make_case(**EXPERTS[name])
    found = run_kernel(operands, gates, options)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)
    assert "RACE" not in "".join(capfd.readouterr())


@OLD_INTERPRETER
def test_a_row_does_not_depend_on_other_rows_or_experts():
    """Fails if a row changes by a bit where others are NaN, or choose other experts."""
    operands, gates, options, _ = make_case(**EXPERTS["gates and a residual"])
    found = run_kernel(operands, gates, options)
    unused, of_others = (np.flatnonzero(x == 0) for x in (gates.any(0), gates[0]))
    assert len(unused) < len(of_others)
    others = operands._replace(
        x=operands.x.at[1:].set(jnp.nan),
        up=operands.up.at[of_others].set(jnp.nan),
        down=operands.down.at[unused].set(jnp.nan),
    )
    np.testing.assert_array_equal(found[0], run_kernel(others, gates, options)[0])
    alone = operands._replace(x=operands.x[:1], residual=operands.residual[:1])
    np.testing.assert_array_equal(found[:1], run_kernel(alone, gates[:1], options))


@OLD_INTERPRETER
def test_padding_alone_adds_nothing():
    operands, gates, options, _ = make_case(**EXPERTS["gates and a residual"])
    found = run_kernel(operands, 0 * gates, options)
    np.testing.assert_array_equal(found, np.float32(operands.residual))


SHAPES = [
    (1, 128, 8, 2048, 768),
    (16, 128, 8, 2048, 768),
    (64, 8, 2, 4096, 14336),
    (2, 64, 6, 2048, 1408),
    (64, 256, 8, 1024, 512),
]


@pytest.mark.parametrize(("rows", "experts", "top_k", "width", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_router_lowers_to_one_kernel(
    on_hopper, rows, experts, top_k, width, hidden, dtype
):
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((width, experts), dtype)
    matrix = jax.eval_shape(lambda kernel: lay_router(kernel, jnp.bfloat16), kernel)

    def run(x, matrix, bias, scale):
        return choose_experts(
            x,
            matrix,
            num_experts=experts,
            top_k=top_k,
            bias=bias,
            logit_bias=bias,
            scores="sigmoid" if rows == 2 else "softmax",
            norm=(scale, 1e-6) if rows == 1 else None,
            counts=jnp.arange(rows) < 3,
        )

    bias, scale = (
        jax.ShapeDtypeStruct((experts,), jnp.float32),
        x.update(shape=(width,)),
    )
    assert num_kernels(run, x, matrix, bias, scale) == 1


@pytest.mark.parametrize(("rows", "experts", "top_k", "width", "hidden"), SHAPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
def test_all_experts_lower_to_two_kernels(
    on_hopper, rows, experts, top_k, width, hidden, activation
):
    """Fails if the kernels ask for what Mosaic cannot do: copies, layouts, memory."""
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    most = min(experts, rows * top_k)

    def run(x, gates, up, down):
        choice, norm = Choice.of(gates, most), (x[0], 1e-6) if rows < 64 else None
        settings = dict(activation=activation, norm=norm, residual=x)
        if rows == 2:
            settings |= dict(up_bias=up[:, 0], down_bias=down[:, 0])
        return few_rows_experts(x, choice, up, down, **settings)

    parts = Options(activation=activation).num_parts
    shapes = (experts, width, hidden * parts), (experts, hidden, width)
    gates = jax.ShapeDtypeStruct((experts, rows), jnp.float32)
    assert num_kernels(run, make((rows, width)), gates, *map(make, shapes)) == 2


@pytest.mark.parametrize("early", [False, True])
def test_early_kernels_wait_for_the_kernels_before(on_hopper, early):
    """Fails if a kernel never starts early, or starts so without being asked."""
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def run(x, matrix, up, down):
        choice = choose_experts(x, matrix, num_experts=8, top_k=2, early=early)
        return few_rows_experts(x, choice, up, down, early=early)

    shapes = (1, 128), (128, 64), (8, 128, 256), (8, 128, 128)
    text = cuda_program(run, *map(make, shapes))
    assert text.count("custom_call @mosaic_gpu") == 3
    assert ("griddepcontrol.wait" in text) == (early and HAS_EARLY_START)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_router_fits_in_a_cluster(rows, columns):
    tuning = choose_router(rows, 3 * 2048, columns)
    assert tuning.width == columns and tuning.stages >= 2
    assert tuning.splits == 8 or rows * columns > 16 * 256
