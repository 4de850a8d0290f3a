"""Numbers of a token are the same bits beside any others, and gradients are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.lowering import num_kernels
from zjax.ops import attention, invariant, invariant_attention, invariant_layers, rotary
from zjax_kernels import device, norm
from zjax_kernels.invariant import api

ROWS = 48
RNG = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32), dtype)


X, Y, SCALE = draw(ROWS, 40), draw(ROWS, 40), draw(40)
ROTATION = jnp.cos(X[None, :, :20]), jnp.sin(X[None, :, :20])
OF_ROWS = {
    "exp": lambda x, y: invariant.exp(30 * x),
    "log": lambda x, y: invariant.log(jnp.abs(x)),
    "partition": lambda x, y: invariant.log_partition(x),
    "product": lambda x, y: invariant_layers.dot(x, X[:40, :9]),
    "logits": lambda x, y: invariant_layers.logits(x, Y[:7]),
    "rms norm": lambda x, y: invariant_layers.normalize(
        x, SCALE, None, eps=1e-5, centre=False
    ),
    "layer norm": lambda x, y: invariant_layers.normalize(
        x, SCALE, SCALE, eps=1e-5, centre=True
    ),
    "rotation": lambda x, y: invariant_layers.rotate(
        x[None, :, None], y[None, :, :20], x[None, :, 20:]
    )[0],
    "cap": lambda x, y: invariant.soft_cap(x, 0.7),
    **{
        name: lambda x, y, name=name: invariant_layers.activate(
            name, *((x, y) if "glu" in name else (x,))
        )
        for name in ("gelu", "gelu_exact", "swiglu", "geglu", "clamped_swiglu")
    },
}


@pytest.mark.parametrize("compute", OF_ROWS.values(), ids=OF_ROWS)
def test_a_row_is_the_same_bits_beside_any_rows_and_in_any_program(compute):
    """Fails if a compiler contracts or orders a number by its neighbours."""
    whole = np.asarray(jax.jit(compute)(X, Y))

    def beside(x, y):
        return compute(x + 0.0, y) * 3.0 + 1.0, compute(x, y)

    for number in (1, 3, 7):
        some = np.asarray(jax.jit(beside)(X[:number], Y[:number])[1])
        np.testing.assert_array_equal(some, whole[:number])


def test_a_product_is_rounded_before_a_sum():
    """Fails if a compiler contracts the two, as it does where they stand together."""
    products = np.asarray(jax.jit(invariant.product)(X, Y))
    sums = jax.jit(lambda x, y: invariant.product(x, y) + x)(X, Y)
    np.testing.assert_array_equal(sums, products + np.asarray(X))


@pytest.mark.parametrize("function", [invariant.exp, invariant.log])
def test_functions_do_not_depend_on_the_place_in_an_array(function):
    """Fails if the last numbers of an array are computed one by one, in another way."""
    numbers = jnp.abs(draw(1_000))
    run = jax.jit(function)
    whole = np.asarray(run(numbers))
    for size in (3, 5, 7, 15):
        np.testing.assert_array_equal(run(numbers[:size]), whole[:size])


def test_exponentials_and_logarithms_are_those_of_numpy():
    x = np.linspace(-86, 88, 10_001, dtype=np.float32)
    found = np.asarray(invariant.exp(jnp.asarray(x)))
    np.testing.assert_allclose(found, np.exp(np.float64(x)), rtol=4e-7)
    powers = np.exp(np.linspace(-80, 80, 10_001)).astype(np.float32)
    found = np.asarray(invariant.log(jnp.asarray(powers)))
    np.testing.assert_allclose(found, np.log(np.float64(powers)), rtol=2e-7, atol=2e-7)
    edges = jnp.array([0.0, -jnp.inf, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(invariant.exp(edges), [1.0, 0.0, np.inf, np.nan])
    assert np.isnan(invariant.log_partition(jnp.array([[0.0, jnp.nan]]))).all()


def test_matrices_side_by_side_give_the_bits_of_matrices_apart():
    """Fails if the order of a sum depends on the columns, or a column on another."""
    x, left, right = X.astype(jnp.bfloat16), draw(40, 5), draw(40, 11)
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    joined = invariant_layers.dot(x, jnp.concatenate([left, right], 1))
    apart = invariant_layers.dot(x, left), invariant_layers.dot(x, right)
    np.testing.assert_array_equal(joined, jnp.concatenate(apart, 1))
    wide = np.float32(x) @ np.float32(left)
    np.testing.assert_allclose(np.float32(apart[0]), wide, rtol=8e-3, atol=1e-2)


def test_16_bits_are_rounded_whatever_follows():
    """Fails if a compiler keeps the digits of a sum that bfloat16 does not have."""
    x, y = X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
    factor = np.float32(3.3)
    wide = jax.jit(lambda x, y: invariant.add(x, y).astype(jnp.float32) * factor)(x, y)
    np.testing.assert_array_equal(wide, np.float32(x + y) * factor)


PLAIN = {
    "dot": (invariant_layers.dot, jnp.dot, (X, X[:40])),
    "norm": (
        functools.partial(invariant_layers.normalize, eps=1e-5, centre=True),
        functools.partial(norm.layer_norm, eps=1e-5, implementation="reference"),
        (X, SCALE, Y[0]),
    ),
    "rotation": (
        invariant_layers.rotate,
        rotary.rotate,
        (X[None, :, None], *ROTATION),
    ),
}


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_values_and_gradients_are_those_of_the_usual_layers(case):
    found, plain, arrays = case

    def both(run):
        def loss(*arrays):
            y = run(*arrays)
            return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

        numbers = range(len(arrays))
        gradient, y = jax.grad(loss, argnums=[*numbers], has_aux=True)(*arrays)
        return y, gradient

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5),
        both(found),
        both(plain),
    )


@pytest.mark.parametrize(
    ("bounds", "has_sinks"),
    [
        (attention.UNBOUNDED, False),
        (attention.Bounds(window=5), True),
        (attention.Bounds(soft_cap=1.5), False),
    ],
)
def test_attention_is_that_of_the_usual_kernel(bounds, has_sinks):
    """In packed rows, of values and of gradients; texts end within blocks."""
    q, k, v = draw(2, 40, 4, 6), draw(2, 40, 2, 6), draw(2, 40, 2, 6)
    sinks = draw(4) if has_sinks else None
    ids = jnp.asarray(np.repeat([[1, 2, 3], [1, 1, 2]], [3, 19, 18], axis=1))
    starts = np.array([[0, 3, 22], [0, 0, 22]])
    positions = jnp.arange(40)[None] - np.repeat(starts, [3, 19, 18], axis=1)
    plain = functools.partial(
        attention.dot_product_attention, causal=True, bounds=bounds
    )
    scores = invariant_attention.scores_of(bounds, 6)

    def in_order(q, k, v, sinks, segment_ids):
        given = positions.astype(jnp.int32), scores
        return invariant_attention.attend_to_rows(
            plain, q, k, v, *given, sinks=sinks, segment_ids=segment_ids
        )

    def usual(q, k, v, sinks, segment_ids):
        return plain(q, k, v, sinks=sinks, segment_ids=segment_ids)

    @functools.partial(jax.jit, static_argnums=0)
    def both(run, q, k, v, sinks):
        def loss(*arrays):
            y = run(*arrays, ids)
            return (y * jnp.sin(jnp.arange(y.size).reshape(y.shape))).sum(), y

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v, sinks)

    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(compare, both(in_order, q, k, v, sinks), both(usual, q, k, v, sinks))


def shape_of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def attend_in_rows(q, k, v, positions):
    plain = functools.partial(attention.dot_product_attention, causal=True)
    scores = invariant_attention.scores_of(attention.UNBOUNDED, 64)
    return invariant_attention.attend_to_rows(plain, q, k, v, positions, scores)


def attend_in_pages(q, keys, values, pages, starts):
    scores = invariant_attention.scores_of(attention.UNBOUNDED, 64)
    where = pages, starts, starts
    return invariant_attention.attend_to_pages(q, keys, values, *where, scores)


WIDE, HEADS, POOL = shape_of(5, 128), shape_of(2, 24, 2, 64), shape_of(9, 2, 16, 64)
NUMBERS = shape_of(2, dtype=jnp.int32)
ON_HOPPER = {
    "product": (invariant_layers.dot, WIDE, shape_of(128, 64)),
    "logits": (invariant_layers.logits, WIDE, shape_of(77, 128)),
    "norm": (
        lambda x: invariant_layers.normalize(x, x[0], None, eps=1e-5, centre=False),
        WIDE,
    ),
    "partition": (invariant.log_partition, shape_of(5, 128, dtype=jnp.float32)),
    "rows": (attend_in_rows, *[HEADS] * 3, shape_of(2, 24, dtype=jnp.int32)),
    "pages": (
        attend_in_pages,
        *(HEADS, POOL, POOL, shape_of(2, 3, dtype=jnp.int32), NUMBERS),
    ),
}


@pytest.mark.parametrize("name", ON_HOPPER)
def test_each_operation_is_a_kernel_on_a_hopper_gpu(monkeypatch, name):
    """Fails if plain JAX, which is many times slower, takes the place of a kernel."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    monkeypatch.setattr(api, "num_devices", lambda: 1)
    run, *arrays = ON_HOPPER[name]
    assert num_kernels(run, *arrays) == 1
