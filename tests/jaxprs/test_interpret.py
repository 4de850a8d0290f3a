"""One walk through a program opens what is called in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zjax.jaxprs import program as primitives
from zjax.jaxprs.program import apply, interpret, programs_in, walk
from zjax_kernels import device, grouped_matmul

TABLE = np.arange(3.0, dtype=np.float32)


def body(x):
    return jnp.sin(x) * TABLE


@jax.custom_jvp
def by_jvp(x):
    return body(x)


@jax.custom_vjp
def by_vjp(x):
    return body(x)


by_jvp.defjvp(lambda x, t: (by_jvp(*x), t[0]))
by_vjp.defvjp(lambda x: (body(x), ()), lambda _, t: (t,))


def gradient(x, **settings):
    return jax.grad(lambda x: jax.checkpoint(body, **settings)(x).sum())(x)


CALLS = {
    "jit": jax.jit(body),
    "jit within jit": jax.jit(lambda x: jax.jit(body)(x) + 1),
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "checkpoint": jax.checkpoint(body),
    "recomputed": gradient,
    "recomputed in a loop": lambda x: gradient(x, prevent_cse=False),
}


def kinds_in(function, *args):
    """The primitives that a rule is asked about, and what the program returns."""
    found = []

    def rule(equation, inputs):
        found.append(equation.primitive.name)
        return apply(equation, inputs)

    return found, interpret(jax.make_jaxpr(function)(*args), args, rule)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_no_matter_of_the_rule(name):
    """Fails if a call is not opened, or a block loses the barrier that keeps it."""
    x = jnp.ones(3)
    kinds, (result,) = kinds_in(CALLS[name], x)
    np.testing.assert_allclose(result, CALLS[name](x), rtol=1e-6)
    assert {"sin", "cos"} & {*kinds}
    assert not primitives.CALLS & {*kinds}
    assert ("optimization_barrier" in kinds) == (name == "recomputed")


def scanned(x):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=2)[0]


def mapped(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P())(x)


INSIDE = {
    "scan": (scanned, 1),
    "while": (lambda x: jax.lax.while_loop(lambda x: x[0] > 0.8, jnp.sin, x), 2),
    "cond": (lambda x: jax.lax.cond(x.all(), jnp.sin, jnp.cos, x), 2),
    "shard_map": (mapped, 1),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_more_than_a_call_is_left_to_the_rule(name):
    """Fails if the programs of an equation are not found, or are taken for calls."""
    function, number = INSIDE[name]
    x = jnp.ones(3)
    kinds, (result,) = kinds_in(function, x)
    np.testing.assert_allclose(result, function(x), rtol=1e-6)
    assert kinds.count(name) == 1
    (equation,) = (
        e for e in jax.make_jaxpr(function)(x).eqns if e.primitive.name == name
    )
    assert len(programs_in(equation)) == number
    inside = [each for program in programs_in(equation) for each in walk(program)]
    assert "sin" in {each.primitive.name for each in inside}


def test_constants_are_asked_for_as_they_are_read():
    """Fails if a constant is taken for an input, or none is asked for."""
    seen = []

    def constant(value):
        seen.append(np.asarray(value).tolist())
        return "constant"

    def rule(equation, inputs):
        assert inputs == ["input", "constant"]
        return ["input"]

    program = jax.make_jaxpr(lambda x: (x * TABLE + 2, 3.0))(jnp.ones(3))
    assert interpret(program, ["input"], rule, constant) == ["input", "constant"]
    assert seen == [[0, 1, 2], 2, 3]


def test_kernels_for_gpus_are_walked(monkeypatch):
    """Their constants are memory that has no value before they run."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    x, weights = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((2, 128, 128))
    operands = x, weights.astype(x.dtype), jnp.full(2, 32)
    names = {e.primitive.name for e in walk(jax.make_jaxpr(grouped_matmul)(*operands))}
    assert "wgmma_ref" in names
