"""What a result of an optimizer depends on shows array by array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.offload.groups import trace


def branch(x, y, which):
    return jax.lax.switch(
        which, [lambda x, y: (x + 1, y), lambda x, y: (x * 2, y * 3)], x, y
    )


def looped(x, y):
    return jax.lax.fori_loop(0, 3, lambda _, x: x * x + 1, x), jnp.tanh(y)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x)


custom.defjvp(lambda x, t: (custom(*x), t[0]))
CASES = {
    "choice": (branch, (2.0, jnp.arange(3.0), 1)),
    "choice out of range": (branch, (2.0, jnp.arange(3.0), 7)),
    "loop": (looped, (jnp.arange(2.0), jnp.ones(2))),
    "custom derivative": (lambda x: custom(x) + jnp.linalg.norm(x), (jnp.ones(2),)),
    "constants": (lambda x: x @ np.eye(2, dtype=np.float32) + 1, (jnp.ones(2),)),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((x, y)), (1.0, 2.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_program_gives_what_its_function_gives(name):
    function, inputs = CASES[name]
    program, _ = trace(function, *inputs)
    expected = jax.tree.leaves(function(*inputs))
    found = jax.jit(program)(*map(jnp.asarray, inputs))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("name", ["choice", "barrier"])
def test_results_depend_on_their_own_operands_alone(name):
    """Fails if a choice or a barrier ties arrays together."""
    function, inputs = CASES[name]
    program, _ = trace(function, *inputs)
    first, second, *others = program.inputs
    for own, output in zip((first, second), program.outputs, strict=True):
        assert set(program.part((), [output]).inputs) == {own, *others}
