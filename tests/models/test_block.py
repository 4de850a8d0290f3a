import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.support import language
from tests.support.first_state import first_weights
from zjax.models.build import make_model
from zjax.settings import schema


def evaluate(config, key=None):
    """Loss and gradients of the same weights."""
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    params = language.params_of(language.make_language_model(language.GPT))

    @jax.jit
    def gradients(params):
        def loss(params):
            return model.loss(params, {}, language.make_text(config), key).value

        return jax.value_and_grad(loss)(params)

    return gradients(params)


@pytest.fixture(scope="module")
def unrolled():
    return evaluate(language.GPT)


def test_loop_equals_separate_layers(unrolled):
    config = dataclasses.replace(language.GPT, layers_per_scan=1)
    check_equal(evaluate(config), unrolled)


@pytest.mark.parametrize(
    ("policy", "layers_per_scan"), [("full", 1), ("dots", 0), ("attention_and_mlp", 0)]
)
def test_recomputation_changes_no_value(unrolled, policy, layers_per_scan):
    config = dataclasses.replace(
        language.GPT, remat=policy, layers_per_scan=layers_per_scan
    )
    check_equal(evaluate(config), unrolled)


@pytest.mark.parametrize("layers_per_scan", [0, 1])
def test_recomputation_keeps_less_for_the_backward_pass(layers_per_scan):
    """Fails if `remat` does not reach the blocks."""
    batch = language.make_text(language.GPT)

    def num_kept(policy):
        config = dataclasses.replace(
            language.GPT, remat=policy, layers_per_scan=layers_per_scan
        )
        graph, state = nnx.split(language.make_language_model(config))

        def loss(state):
            return language.sums_of(nnx.merge(graph, state), batch).loss_sum

        backward = jax.eval_shape(lambda state: jax.vjp(loss, state)[1], state)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    full, named, dots, everything = map(
        num_kept, ("full", "attention_and_mlp", "dots", "none")
    )
    assert full < named < dots < everything


def test_loop_drops_the_same_entries_as_separate_layers():
    """Fails if the layers of a loop share a key."""
    rates = {"dropout_rate": 0.5, "attention_dropout_rate": 0.5}
    apart = dataclasses.replace(language.GPT, num_layers=4, **rates)
    loop = dataclasses.replace(apart, layers_per_scan=2)
    key, batch = jax.random.key(3), language.make_text(apart)

    def loss(config):
        model = make_model(schema.Config(model=config))
        params = first_weights(model.init)
        return float(jax.jit(model.loss)(params, {}, batch, key).value)

    np.testing.assert_allclose(loss(loop), loss(apart), rtol=1e-5)


def test_recomputed_attention_drops_the_same_weights():
    """Fails if the backward pass draws again."""
    rates = {"dropout_rate": 0.2, "attention_dropout_rate": 0.5}
    key, batch = jax.random.key(3), language.make_text(language.GPT)

    def gradients(policy):
        config = dataclasses.replace(language.GPT, remat=policy, **rates)
        model = make_model(schema.Config(model=config))
        params = first_weights(model.init)

        def loss(params):
            return model.loss(params, {}, batch, key).value

        return jax.jit(jax.grad(loss))(params)

    check_equal(gradients("full"), gradients("none"))


def check_equal(found, expected):
    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)

    jax.tree.map(compare, found, expected)
