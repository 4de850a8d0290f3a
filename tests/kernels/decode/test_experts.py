"""Experts of few rows: the reference against NumPy, and what is refused."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_product import ACTIVATIONS
from tests.support.refusals import value_error
from zjax_kernels import Choice, choose_experts, device, few_rows_experts, lay_router


def choose(x, kernel, *, top_k, scores="softmax", bias=0, logit_bias=0, **given):
    """The weight of each expert in each row, [N, E], by loops in NumPy."""
    x, kernel = np.float64(x), np.float64(kernel)
    normalise, scale = given.get("normalise", True), given.get("scale", 1.0)
    if given.get("norm"):
        norm, eps = given["norm"]
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * np.float64(norm)
    logits = x @ kernel + np.float64(logit_bias)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    values = exponentials / exponentials.sum(1, keepdims=True)
    if scores == "sigmoid":
        values = 1 / (1 + np.exp(-logits))
    gates = np.zeros(logits.shape)
    for row, value in enumerate(values):
        if given.get("counts") is not None and not given["counts"][row]:
            continue
        order = np.argsort(-(value + np.float64(bias)), kind="stable")[:top_k]
        total = value[order].sum() if normalise and top_k > 1 else 1.0
        gates[row, order] = scale * value[order] / total
    return gates


def add_up(
    x,
    gates,
    up,
    down,
    *,
    activation="swiglu",
    norm=None,
    residual=None,
    up_bias=None,
    down_bias=None,
):
    """What experts make of rows, by loops in NumPy."""
    x, up, down = (np.float64(array) for array in (x, up, down))
    if norm is not None:
        scale, eps = norm
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * np.float64(scale)
    total = np.zeros((len(x), down.shape[2]))
    for row, expert in zip(*np.nonzero(gates), strict=True):
        inputs = x[row] @ up[expert]
        if up_bias is not None:
            inputs += np.float64(up_bias[expert])
        parts = np.split(inputs, 2 if "glu" in activation else 1)
        outputs = ACTIVATIONS[activation](*parts) @ down[expert]
        if down_bias is not None:
            outputs += np.float64(down_bias[expert])
        total[row] += gates[row, expert] * outputs
    return total if residual is None else total + np.float64(residual)


def assert_chosen(choice, gates):
    """Compares a choice with weights [N, E]."""
    rows, experts = gates.shape
    used = np.flatnonzero(gates.any(0))
    np.testing.assert_allclose(choice.gates[:experts, :rows].T, gates, rtol=1e-5)
    np.testing.assert_array_equal(choice.gates[experts:], 0)
    np.testing.assert_array_equal(choice.gates[:, rows:], 0)
    np.testing.assert_array_equal(choice.count, len(used))
    np.testing.assert_array_equal(choice.ids[: len(used)], used)
    np.testing.assert_array_equal(choice.ids[len(used) :], -1)


def draw(*shape, seed=0, scale=1.0):
    values = scale * np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


ROUTERS = {
    "softmax": dict(top_k=2),
    "one expert": dict(top_k=1, normalise=False),
    "all experts": dict(top_k=9, scale=0.5),
    "sigmoid and a bias": dict(
        top_k=3, scores="sigmoid", bias=draw(9, seed=3), scale=2.5
    ),
    "logits with a bias": dict(top_k=2, logit_bias=draw(9, seed=4)),
    "padding": dict(top_k=2, counts=jnp.array([True, False, True, False])),
    "nothing but padding": dict(top_k=2, counts=jnp.zeros(4, bool)),
    "a norm": dict(top_k=2, norm=(1.0 + draw(5, seed=5, scale=0.1), 0.1)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_as_numpy_does(name):
    """Fails if a bias, a factor, a mask or the norm changes nothing."""
    x, kernel, settings = draw(4, 5), draw(5, 9, seed=1), ROUTERS[name]
    matrix = lay_router(kernel, x.dtype)
    choice = choose_experts(x, matrix, num_experts=9, **settings)
    assert choice.most == min(9, 4 * settings["top_k"])
    assert_chosen(choice, choose(x, kernel, **settings))


def test_the_first_of_equal_experts_is_chosen():
    x, matrix = jnp.ones((2, 4)), lay_router(jnp.ones((4, 5)), jnp.float32)
    choice = choose_experts(x, matrix, num_experts=5, top_k=2)
    assert_chosen(choice, np.array([[0.5, 0.5, 0, 0, 0]] * 2))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_laid_matrix_loses_no_bit(dtype):
    kernel = draw(6, 70).astype(dtype)
    laid = lay_router(kernel, jnp.bfloat16)
    num_terms = 3 if dtype == jnp.float32 else 1
    assert laid.dtype == jnp.bfloat16 and laid.shape == (6 * num_terms, 128)
    terms = np.float64(laid).reshape(num_terms, 6, 128).sum(0)
    np.testing.assert_array_equal(terms[:, :70], np.float64(kernel))
    np.testing.assert_array_equal(terms[:, 70:], 0)


def test_logits_of_16_bits_are_those_of_float32():
    """Fails if a term of the matrix is left out: then other experts are chosen."""
    x, kernel = draw(4, 64).astype(jnp.bfloat16), 1 + draw(64, 9, seed=1, scale=1e-3)
    choice = choose_experts(x, lay_router(kernel, x.dtype), num_experts=9, top_k=3)
    assert_chosen(choice, choose(x, kernel, top_k=3))


EXPERTS = {
    "gates": dict(),
    "no gates": dict(activation="gelu"),
    "clamped gates": dict(activation="clamped_swiglu", residual=draw(3, 4, seed=7)),
    "gates with gelu": dict(activation="geglu"),
    "a norm": dict(norm=(draw(5, seed=8), 0.1), residual=draw(3, 4, seed=9)),
    "biases": dict(
        activation="clamped_swiglu",
        residual=draw(3, 4, seed=9),
        up_bias=draw(6, 4, seed=10),
        down_bias=draw(6, 4, seed=11),
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_add_up_as_in_numpy(name):
    settings = EXPERTS[name]
    parts = 1 if settings.get("activation") == "gelu" else 2
    x, up, down = draw(3, 5), draw(6, 5, 2 * parts, seed=1), draw(6, 2, 4, seed=2)
    gates = np.zeros((3, 6), np.float32)
    gates[0, [1, 4]], gates[2, [4, 5]] = (0.3, 0.7), (1.2, -0.4)
    choice = Choice.of(jnp.asarray(gates.T), 6)
    assert_chosen(choice, gates)
    found = few_rows_experts(x, choice, up, down, **settings)
    expected = add_up(x, gates, up, down, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_chosen_is_not_read():
    """Fails if an expert without rows, or a row's weight of 0, reaches a sum."""
    x, up, down = draw(2, 5), draw(3, 5, 4, seed=1), draw(3, 2, 4, seed=2)
    gates = jnp.array([[0.0, 0.0], [0.5, 0.0], [0.0, 1.5]])
    choice = Choice.of(gates, 2)
    expected = few_rows_experts(x, choice, up, down)
    up, down = up.at[0].set(jnp.nan), down.at[0].set(jnp.nan)
    np.testing.assert_array_equal(few_rows_experts(x, choice, up, down), expected)
    # Infinite hidden channels of row 1 in the expert of row 0.
    up = up.at[1].set(jnp.inf)
    found = few_rows_experts(x, choice, up, down)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_router_that_does_not_fit_is_refused():
    x, matrix = jnp.ones((2, 4)), jnp.ones((4, 64))
    with value_error(
        "scores=relu is not a function; use softmax or sigmoid\n"
        "norm[1]=-1.0 is below 0; use 1e-5\n"
        "top_k=4 is not a number of the 3 experts; use 1 to 3\n"
        "matrix.shape=(5, 64) does not fit x of shape (2, 4) and 3 experts; use "
        "lay_router\n"
        "bias.shape=(2,) does not fit x of shape (2, 4); give (3,)\n"
        "counts.shape=(3,) does not fit x of shape (2, 4); give (2,)"
    ):
        choose_experts(
            x,
            jnp.ones((5, 64)),
            num_experts=3,
            top_k=4,
            scores="relu",
            norm=(jnp.ones(4), -1.0),
            bias=jnp.ones(2),
            counts=jnp.ones(3, bool),
        )
    with value_error(
        "matrix.shape=(4, 64) does not fit x of shape (2, 4) and 65 experts; use "
        "lay_router"
    ):
        choose_experts(x, matrix, num_experts=65, top_k=1)
    with value_error("x.shape=(4,) does not have 2 dims; give [N, K]"):
        choose_experts(x[0], matrix, num_experts=3, top_k=1)


def test_experts_that_do_not_fit_are_refused():
    choice = Choice.of(jnp.ones((3, 2)), 3)
    x, up, down = jnp.ones((2, 4)), jnp.ones((3, 4, 6)), jnp.ones((3, 3, 4))
    with value_error(
        "activation=relu is not an activation; use one of gelu, swiglu, geglu, "
        "clamped_swiglu\n"
        "norm[1]=-1.0 is below 0; use 1e-5"
    ):
        few_rows_experts(x, choice, up, down, activation="relu", norm=(x[0], -1.0))
    others = "x of shape (2, 4) and down of shape (2, 3, 4)"
    with value_error(
        f"up.shape=(3, 4, 6) does not fit {others}; give (2, 4, 6)\n"
        f"residual.shape=(3, 4) does not fit {others}; give (2, 4)\n"
        "down.dtype=bfloat16 is not the dtype of x, float32; cast one"
    ):
        down = jnp.ones((2, 3, 4), jnp.bfloat16)
        few_rows_experts(x, choice, up, down, residual=jnp.ones((3, 4)))
    others = "x of shape (2, 4) and down of shape (3, 3, 4)"
    with value_error(
        f"up_bias.shape=(3, 3) does not fit {others}; give (3, 6)\n"
        f"down_bias.shape=(4,) does not fit {others}; give (3, 4)"
    ):
        biases = dict(up_bias=jnp.ones((3, 3)), down_bias=jnp.ones(4))
        few_rows_experts(x, choice, up, jnp.ones((3, 3, 4)), **biases)
    with value_error("down.shape=(3, 4) does not have 3 dims; give [E, F, M]"):
        few_rows_experts(x, choice, up, jnp.ones((3, 4)))
    with value_error("x.dtype=int32 is not of floats; cast the arrays"):
        whole = (jnp.ones(y.shape, jnp.int32) for y in (up, jnp.ones((3, 3, 4))))
        few_rows_experts(jnp.ones((2, 4), jnp.int32), choice, *whole)


UNSUPPORTED = {
    "it needs bfloat16 or float16 rows and x is float32; cast it": dict(
        dtype=jnp.float32
    ),
    "it needs 1 to 64 rows and x has 65; use grouped_matmul": dict(rows=65),
    "it needs a multiple of 64 inputs, not 80; pad them": dict(depth=80),
    "it needs multiples of 64 hidden channels and outputs, not 32 and 64; pad them": (
        dict(hidden=32)
    ),
    "it needs a matrix of bfloat16 and this is of float32; use lay_router": dict(
        laid=jnp.float32
    ),
    "it needs up to 256 experts and these are 257; use fewer": dict(experts=257),
}


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_arrays_without_a_kernel_are_told(on_hopper, caplog, text):
    """`auto` takes the reference and logs the problem; `mosaic_gpu` refuses."""
    case = dict(rows=2, depth=64, hidden=64, dtype=jnp.bfloat16, experts=3)
    case |= UNSUPPORTED[text]
    dtype, experts = case["dtype"], case["experts"]
    x = jnp.ones((case["rows"], case["depth"]), dtype)

    def run(**given):
        if "laid" in case or experts > 256:
            kernel = jnp.ones((case["depth"], experts), case.get("laid", dtype))
            matrix = lay_router(kernel, case.get("laid", dtype))
            given |= dict(num_experts=experts, top_k=1)
            return choose_experts(x, matrix, **given).count[0]
        choice = Choice.of(jnp.ones((experts, len(x))), experts)
        shapes = (case["depth"], 2 * case["hidden"]), (case["hidden"], 64)
        up, down = (jnp.zeros((experts, *shape), dtype) for shape in shapes)
        return 1 + few_rows_experts(x, choice, up, down, **given)

    with value_error(
        f"implementation=mosaic_gpu cannot run: {text}, or use "
        "implementation='reference'"
    ):
        run(implementation="mosaic_gpu")
    device._log_choice.cache_clear()
    with caplog.at_level(logging.WARNING, "zjax_kernels"):
        np.testing.assert_array_equal(np.float32(run()), 1)
    [message] = caplog.messages
    assert message.endswith(f"of few rows: reference ({text.split(';')[0]})")


def test_no_device_is_refused():
    x = jnp.ones((1, 64), jnp.bfloat16)
    matrix = lay_router(jnp.ones((64, 8)), x.dtype)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU and this is cpu"):
        choose_experts(x, matrix, num_experts=8, top_k=1, implementation="mosaic_gpu")
    up, down = jnp.ones((8, 64, 128), x.dtype), jnp.ones((8, 64, 64), x.dtype)
    choice = jax.jit(lambda: Choice.of(jnp.ones((8, 1)), 8))()
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU and this is cpu"):
        few_rows_experts(x, choice, up, down, implementation="mosaic_gpu")
