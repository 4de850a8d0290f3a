"""Where a plan puts what is not of a parameter."""

import jax
import jax.numpy as jnp
import optax

from tests.support import runs
from zjax.sharding.mesh import axes_of


def test_state_of_whole_numbers_stays_whole():
    """Fails if a table of counters of an optimizer is split over the devices, which
    read it wherever they are."""

    def init(params):
        del params
        return {"seen": jnp.zeros(1024, jnp.int32), "sums": jnp.zeros(1024)}

    def update(updates, state, params=None):
        del params
        return updates, state

    tx = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.1))
    rows = jax.tree.leaves(runs.make_small_plan(tx, 2).opt_state)
    split = {row.path.split("/")[-1]: axes_of(row.spec, 1) for row in rows}
    assert split == {"seen": [()], "sums": [("data",)]}
