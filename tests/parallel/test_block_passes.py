"""A function and its derivative in passes that add up to what JAX computes in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.trees import assert_close
from zjax.ops import remat
from zjax.parallel.block_passes import (
    differentiate_in_passes,
    split_backward,
    without_params,
)

WIDTH = 6


def two_layers(params, stream, nondiff):
    """Has what blocks have: products, a norm of its own, masks, and more results."""
    x, total = stream
    table, key = nondiff
    for weights in params["layers"]:
        hidden = jax.nn.silu(x @ weights["up"]) * jnp.sin(table)[None]
        keep = jax.random.bernoulli(key, 0.5, hidden.shape)
        x = x + jnp.where(keep, hidden, 0) @ weights["down"]
        total = total + jnp.square(x * weights["scale"][None]).mean()
    return x, total


@pytest.fixture
def given():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def layer():
        return {
            "up": jax.random.normal(next(keys), (WIDTH, 2 * WIDTH)),
            "down": jax.random.normal(next(keys), (2 * WIDTH, WIDTH)),
            "scale": jax.random.normal(next(keys), (WIDTH,)),
        }

    params = {"layers": [layer(), layer()]}
    stream = jax.random.normal(next(keys), (3, WIDTH)), jnp.float32(0.25)
    nondiff = jax.random.normal(next(keys), (2 * WIDTH,)), next(keys)
    cotangent = jnp.ones((3, WIDTH)), jnp.float32(2)
    return params, stream, nondiff, cotangent


def expected(function, params, stream, nondiff, cotangent):
    out, pull = jax.vjp(lambda p, x: function(p, x, nondiff), params, stream)
    return out, *pull(cotangent)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_close(found, wanted, rtol=1e-6)


def num_products(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


@pytest.mark.parametrize("policy", ["none", "full"])
def test_passes_compute_what_jax_does(given, policy):
    params, stream, nondiff, cotangent = given
    function = remat.recompute(two_layers, policy, in_loop=True)
    passes = differentiate_in_passes(function, params, stream, nondiff)
    out, residuals = jax.jit(passes.forward)(params, stream, nondiff)
    grads, cotangents = jax.jit(passes.backward)(params, residuals, nondiff, cotangent)
    assert_same(
        (out, grads, cotangents), expected(function, params, stream, nondiff, cotangent)
    )


def test_what_waits_follows_from_the_stream(given):
    """Fails if parameters, tables or random masks are saved for each microbatch."""
    params, stream, nondiff, _ = given
    passes = differentiate_in_passes(two_layers, params, stream, nondiff)
    _, residuals = passes.forward(params, stream, nondiff)
    _, others = passes.forward(params, jax.tree.map(lambda x: x + 1, stream), nondiff)
    for x, other in zip(residuals, others, strict=True):
        assert x.shape[:1] in ((3,), ())
        assert (np.asarray(x) != np.asarray(other)).any()
    remembering = differentiate_in_passes(
        remat.recompute(two_layers, "full", in_loop=True), params, stream, nondiff
    )
    _, least = remembering.forward(params, stream, nondiff)
    assert sum(x.size for x in least) == stream[0].size < sum(x.size for x in residuals)


def test_gradients_of_weights_are_made_apart(given):
    """Fails if a pass computes what is the other's, or both compute it."""
    params, stream, nondiff, cotangent = given
    passes = differentiate_in_passes(two_layers, params, stream, nondiff)
    _, residuals = passes.forward(params, stream, nondiff)
    split = split_backward(passes.backward, params, residuals, nondiff, cotangent)
    cotangents, operands = jax.jit(split.stream)(params, residuals, nondiff, cotangent)
    grads = jax.jit(split.params)(params, residuals, nondiff, operands)
    _, *wanted = expected(two_layers, params, stream, nondiff, cotangent)
    assert_same([grads, cotangents], wanted)
    assert num_products(passes.backward, params, residuals, nondiff, cotangent) == 8
    assert num_products(split.stream, params, residuals, nondiff, cotangent) == 4
    assert num_products(split.params, params, residuals, nondiff, operands) == 4


def a_block(params, stream, nondiff):
    """A norm in float32, and a layer with biases and a gate, in bfloat16."""
    x = stream.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1)
    x = (x * params["scale"][None] + params["bias"][None]).astype(stream.dtype)
    gate, up = x @ params["gate"], x @ params["up"] + params["up_bias"][None]
    hidden = jax.nn.silu(gate) * up
    return stream + hidden @ params["down"] + params["down_bias"][None]


def test_weights_wait_for_no_more_than_their_products_read():
    """Fails if float32 forms of the stream wait for gradients of norms, or twice what
    a bias and a product read, or what follows from what the forward pass left."""
    shapes = {
        "scale": (WIDTH,),
        "bias": (WIDTH,),
        "gate": (WIDTH, 2 * WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "up_bias": (2 * WIDTH,),
        "down": (2 * WIDTH, WIDTH),
        "down_bias": (WIDTH,),
    }
    params = {
        name: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, (name, shape) in enumerate(shapes.items())
    }
    stream = jax.random.normal(jax.random.key(9), (3, WIDTH), jnp.bfloat16)
    passes = differentiate_in_passes(a_block, params, stream, ())
    _, residuals = passes.forward(params, stream, ())
    split = split_backward(passes.backward, params, residuals, (), stream)
    cotangents, operands = jax.jit(split.stream)(params, residuals, (), stream)
    of_tokens = sorted(x.shape for x in operands if x.ndim == 2)
    assert of_tokens == [(3, WIDTH), (3, 2 * WIDTH), (3, 2 * WIDTH)]
    of_norm_and_biases = sorted(x.shape for x in operands if x.ndim == 1)
    assert of_norm_and_biases == [(WIDTH,), (WIDTH,), (WIDTH,), (2 * WIDTH,)]
    assert {x.dtype.name for x in operands} == {"bfloat16"}
    grads = jax.jit(split.params)(params, residuals, (), operands)
    wanted = jax.jit(passes.backward)(params, residuals, (), stream)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x.astype(np.float32), y.astype(np.float32), 0.02, 0.02
        ),
        (grads, cotangents),
        wanted,
    )


def test_what_has_no_elements_does_not_wait():
    """Fails in a pipeline on GPUs: the compiler dies of such arrays in its buffers."""

    @jax.custom_vjp
    def kernel(x):
        return x

    def forward(x):
        return x, (x, jnp.zeros((2, 0), x.dtype))

    def backward(residuals, cotangent):
        x, mask = residuals
        return (cotangent * x + mask.sum(),)

    kernel.defvjp(forward, backward)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jnp.arange(4.0)
    passes = differentiate_in_passes(lambda w, x, _: run(w * x), x, x, ())
    _, residuals = passes.forward(x, x, ())
    assert all(array.size for array in residuals)
    grads, cotangent = passes.backward(x, residuals, (), jnp.ones(4))
    np.testing.assert_allclose(grads, x**3)
    np.testing.assert_allclose(cotangent, x**3)


def test_what_a_loop_computes_beside_its_sums_does_not_depend_on_them():
    """Fails if all that one loop, or one recomputed block, returns counts as one, or if
    more is computed than is asked for."""

    @jax.checkpoint
    def sums(w, rows):
        def add(totals, row):
            return (totals[0] + w @ row, totals[1] + row), ()

        return jax.lax.scan(add, (jnp.zeros(2), jnp.zeros(2)), rows)[0]

    given = jnp.ones((2, 2)), jnp.ones((3, 2))
    assert without_params(lambda *x: sums(*x)[0], *given) is None
    pure = without_params(lambda *x: sums(*x)[1], *given)
    assert pure(given[1]).tolist() == [3, 3]
    assert num_products(pure, given[1]) == 0
