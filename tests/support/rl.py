"""Losses of reinforcement learning: golden values, finite differences, microbatches."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "rl" / "golden.json").read_text()
)
"""Values on fixed tensors, in float64, by formulas in NumPy written apart from zjax."""
INPUTS = {name: np.asarray(value) for name, value in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"].astype(bool)
NEW, OLD, REF, SAMPLER = (INPUTS[name] for name in ("new", "old", "ref", "sampler"))
ADVANTAGES = np.asarray(GOLDEN["advantages"]["grpo_trl_eps1e-4_ddof1"])[:, None]


def spoiled(x, value=np.nan):
    """The array with another value at all positions outside the mask."""
    return np.where(MASK, x, value)


def assert_gradient(function, x, *, step=1e-6):
    """Compares a gradient with finite differences of each entry, in float64."""
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(jax.grad(function))(jnp.asarray(x)))
        evaluate = jax.jit(function)
        for index in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = np.array(x)
                moved[index] += sign * step
                ends.append(float(evaluate(jnp.asarray(moved))))
            expected = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(found[index], expected, rtol=1e-6, atol=1e-7)
    return found
