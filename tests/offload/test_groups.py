"""Which optimizers run group by group, and what each result depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zjax.errors import PlanError
from zjax.offload.groups import SHARED, group_programs, trace

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": jnp.ones(4)}
CLIP = optax.clip_by_global_norm(0.5)
FREE = {
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(1e-2, 0.9),
    "lion": optax.lion(1e-2),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
}
NEEDING_ALL_GRADIENTS = {
    "clip in a chain": optax.chain(CLIP, optax.adamw(1e-2)),
    "clip within clip": optax.chain(CLIP, optax.chain(CLIP, optax.lamb(1e-2))),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(1e-2), 3),
}
REFUSED = {
    "prodigy": optax.contrib.prodigy(1.0),
    "lbfgs": optax.lbfgs(1e-2, linesearch=None),
    "clip after Adam": optax.chain(optax.adam(1e-2), CLIP),
    "MultiSteps of clip": optax.MultiSteps(optax.chain(CLIP, optax.adam(1e-2)), 2),
}


def cut(name, tx):
    """The cut of an update, with one group per parameter."""
    state = tx.init(PARAMS)
    inputs = (PARAMS, state, PARAMS)
    program, outputs = trace(tx.update, *inputs)

    def group_of(keys):
        names = [str(getattr(key, "key", "")) for key in keys]
        return next((i for i, n in enumerate(PARAMS) if n in names), SHARED)

    def keys_of(tree):
        return [keys for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]

    return program, group_programs(
        program,
        list(map(group_of, keys_of(inputs))),
        list(map(group_of, keys_of(outputs))),
        num_groups=len(PARAMS),
        is_gradient=[keys[0].idx == 0 for keys in keys_of(inputs)],
        is_loss=[False] * len(program.inputs),
        optimizer=name,
        paths=[jax.tree_util.keystr(keys) for keys in keys_of(outputs)],
    )


def run_in_groups(program, parts, values):
    """Measures each group, combines, then updates each group."""
    known = dict(zip(program.inputs, values, strict=True))

    def run(part):
        return part(*(known[name] for name in part.inputs))

    for measure in parts.measures:
        known |= zip(measure.outputs, run(measure), strict=True)
    results = run(parts.combine)
    num_shared = len(parts.shared_outputs)
    known |= zip(parts.global_numbers, results[num_shared:], strict=True)
    return [*results[:num_shared], *(x for part in parts.updates for x in run(part))]


@pytest.mark.parametrize("name", [*FREE, *NEEDING_ALL_GRADIENTS])
def test_groups_give_what_the_whole_gives(name):
    """Fails if a group loses an operation, or a number is taken from another group."""
    tx = (FREE | NEEDING_ALL_GRADIENTS)[name]
    program, parts = cut(name, tx)
    assert bool(parts.global_numbers) == (name in NEEDING_ALL_GRADIENTS)
    state = tx.init(PARAMS)
    for step in range(4):
        grads = jax.tree.map(lambda x, s=step: jnp.cos(x * (s + 1)) * x.size, PARAMS)
        values = jax.tree.leaves((grads, state, PARAMS))
        expected = program(*values)
        found = run_in_groups(program, parts, values)
        assert len(found) == len(expected)
        key = functools.partial(np.asarray, dtype=np.float64)
        for x in expected:
            assert any(
                x.shape == y.shape and np.array_equal(key(x), key(y)) for y in found
            )
        _, state = tx.update(grads, state, PARAMS)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_streaming_would_change_are_refused(name):
    with pytest.raises(PlanError, match="so that it cannot run group by group"):
        cut(name, REFUSED[name])


def test_refusal_names_the_optimizer_and_the_arrays():
    with pytest.raises(PlanError) as error:
        cut("chain(adam, clip)", REFUSED["clip after Adam"])
    assert str(error.value) == (
        "optimizer='chain(adam, clip)' updates [0]['a'] and 2 more from the parameters "
        "or the state of other arrays, so that it cannot run group by group; set "
        "zero.offload=None, or use an optimizer that updates each array "
        "from itself and from the gradients' norm"
    )


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
