"""Optimizers with masks and labels made from the state of an NNX module."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from zjax.models import adapter
from zjax.sharding.param_plans import optimizer_name


class Deep(nnx.Module):
    """More layers than ten, whose numbers sort otherwise than their names."""

    def __init__(self, rngs):
        named = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        self.layers = nnx.List(
            [nnx.Linear(2, 2, kernel_init=named, rngs=rngs) for _ in range(11)]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model, batch, key):
    return jnp.mean(model(batch) ** 2)


def make_state():
    with nnx.use_eager_sharding(False):
        return nnx.state(Deep(nnx.Rngs(0)), nnx.Param)


def decayed(mask):
    return optax.chain(optax.add_decayed_weights(0.1, mask=mask), optax.trace(0.9))


def by_label(labels):
    rules = {True: optax.sgd(1.0, momentum=0.5), False: optax.set_to_zero()}
    return optax.partition(rules, labels)


@pytest.mark.parametrize("make_tx", [decayed, by_label])
@pytest.mark.parametrize("model", [Deep, "instance"])
def test_a_state_of_bools_means_what_dicts_of_them_mean(make_tx, model):
    """Fails if an update reaches another layer, as in the order of names."""
    if model == "instance":
        with nnx.use_eager_sharding(False):
            model = Deep(nnx.Rngs(0))
    adapted = adapter.adapt(model, mean_square, jnp.ones((1, 2)))
    params, _ = adapted.init(jax.random.key(0))
    grads = jax.tree.map(lambda x: 2 * x, params)
    mask = nnx.map_state(lambda path, _: path == ("layers", 2, "kernel"), make_state())
    assert sum(jax.tree.leaves(mask)) == 1
    of_dicts = jax.tree.map(lambda _: False, params)
    of_dicts["layers"]["2"]["kernel"] = True

    results = []
    for given in (mask, lambda params: mask, of_dicts):
        tx = adapter.adapt_optimizer(make_tx(given), model, adapted)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)
        updates, state = tx.update(grads, state, params)
        results.append((updates, state))
    *states, dicts = results
    assert jnp.any(dicts[0]["layers"]["2"]["kernel"] != 0)
    for found in states:
        assert jax.tree.structure(found) == jax.tree.structure(dicts)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, found, dicts))


def test_what_fits_dicts_or_nothing_is_left_as_it_is():
    adapted = adapter.adapt(Deep, mean_square, jnp.ones((1, 2)))
    for tx in (optax.adam(0.1), decayed(lambda params: params["nothing"])):
        assert adapter.adapt_optimizer(tx, Deep, adapted) is tx


def test_messages_name_the_optimizer_and_not_what_wraps_it():
    adapted = adapter.adapt(Deep, mean_square, jnp.ones((1, 2)))
    mask = nnx.map_state(lambda path, _: True, make_state())
    tx = adapter.adapt_optimizer(decayed(mask), Deep, adapted)
    assert tx.init.__qualname__.startswith("_on_states")
    assert optimizer_name(tx) == "chain(masked(add_decayed_weights), trace)"
