"""What the table of optax's optimizers promises, in plain JAX."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from optax._src import alias

from tests.support import optimizers

PARAMS = {"kernel": jnp.full((8, 16), 0.5), "bias": jnp.ones(16), "gain": jnp.ones(1)}

COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Each program runs once, so that compiling is all the work."""


def loss(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def update_once(tx, params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optax.with_extra_args_support(tx).update(
        grads, state, params, value=value, grad=grads, value_fn=loss
    )
    return optax.apply_updates(params, updates), state


def published():
    makers = {
        name
        for name in dir(alias)
        if name.islower()
        and not name.startswith("_")
        and callable(getattr(alias, name))
        and getattr(optax, name, None) is getattr(alias, name)
    }
    parts = {
        f"contrib.{name}"
        for name in dir(contrib)
        if name.islower()
        and not name.startswith(("_", "scale_by_"))
        and callable(getattr(contrib, name))
    }
    return makers | parts


def test_table_covers_optax():
    listed = optimizers.OPTIMIZERS.keys() | optimizers.REFUSED.keys()
    extra = {"lookahead", "contrib.sam(opaque_mode)"}
    assert published() == (listed - extra) | optimizers.NOT_OPTIMIZERS
    assert not optimizers.OPTIMIZERS.keys() & optimizers.REFUSED.keys()


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_two_updates_from_one_mean_gradient_each(name):
    """Parameters move; the scan refuses a state that changes its shapes or dtypes."""
    tx = optimizers.OPTIMIZERS[name]()

    def train(params):
        def step(carry, _):
            return update_once(tx, *carry), None

        return jax.lax.scan(step, (params, tx.init(params)), length=2)[0]

    params, _ = jax.jit(train, compiler_options=COMPILE_FAST)(PARAMS)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), params, PARAMS)
    assert all(jax.tree.leaves(moved))
    assert jnp.isfinite(loss(params))


@pytest.mark.parametrize("name", optimizers.REFUSED)
def test_refused_optimizers_fail_in_one_update(name):
    """An entry that has come to work belongs in the table."""
    maker, _ = optimizers.REFUSED[name]

    def two(params):
        tx = maker()
        return update_once(tx, params, tx.init(params))

    with pytest.raises(Exception):  # noqa: B017 each fails in its own way
        jax.eval_shape(two, PARAMS)
