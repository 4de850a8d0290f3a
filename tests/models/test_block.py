import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.support import language
from zjax.config import schema
from zjax.models.build import make_model


def evaluate(config, key=None):
    """Loss and gradients of the same weights, as one tree per layer."""
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    graph, state = nnx.split(language.make_language_model(language.GPT))
    apart = language.params_of(nnx.merge(graph, state))
    stack, plain = model.stack, make_model(schema.Config(model=language.GPT)).stack
    embed, segments, head = plain.split(apart)
    head["embedding"] = jax.tree.map(np.zeros_like, head["embedding"])
    params = stack.join(embed, segments, head)

    @jax.jit
    def gradients(params):
        def loss(params):
            return model.loss(params, {}, language.make_text(config), key).value

        return jax.value_and_grad(loss)(params)

    loss, grads = gradients(params)
    return loss, stack.split(grads)


@pytest.fixture(scope="module")
def unrolled():
    return evaluate(language.GPT)


@pytest.mark.parametrize("layers_per_scan", [1, 2])
def test_loop_equals_separate_layers(unrolled, layers_per_scan):
    config = dataclasses.replace(language.GPT, layers_per_scan=layers_per_scan)
    check_equal(evaluate(config), unrolled)


@pytest.mark.parametrize("policy", ["full", "dots", "attention_and_mlp"])
@pytest.mark.parametrize("layers_per_scan", [0, 1])
def test_recomputation_changes_no_value(unrolled, policy, layers_per_scan):
    config = dataclasses.replace(
        language.GPT, remat=policy, layers_per_scan=layers_per_scan
    )
    check_equal(evaluate(config), unrolled)


def test_loop_drops_the_same_entries_as_separate_layers():
    """Fails if the layers of a loop share a key."""
    dropping = dataclasses.replace(language.GPT, dropout_rate=0.5)
    looped = dataclasses.replace(dropping, layers_per_scan=1)
    key = jax.random.key(3)
    check_equal(evaluate(looped, key), evaluate(dropping, key))


def test_initial_values_do_not_depend_on_the_loop():
    def init(layers_per_scan):
        config = dataclasses.replace(
            language.GPT, num_layers=4, layers_per_scan=layers_per_scan
        )
        model = make_model(schema.Config(model=config))
        return model.stack.split(model.init(jax.random.key(0))[0])

    check_equal(init(2), init(0))


def check_equal(found, expected):
    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)

    jax.tree.map(compare, found, expected)
