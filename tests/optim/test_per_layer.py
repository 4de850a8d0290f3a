"""Layers stored in one array are updated as if each had an array of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.trees import assert_close
from zjax.errors import PlanError
from zjax.optim.per_layer import needs_layers, per_layer_if_needed
from zjax.sharding.layers import Layers, put_together, take_apart
from zjax.sharding.param_plans import optimizer_name

NAMES = {
    "blocks/kernel": ("layers", "embed", "mlp"),
    "blocks/bias": ("layers", "mlp"),
    "table": ("vocab", "embed"),
}
LAYERS = 3


def not_biases(params):
    """A mask by names."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: keys[-1].key != "bias", params
    )


ENTRYWISE = {
    "adam": optax.adam(1e-2),
    "adamw clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adamax": optax.adamax(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(optax.cosine_decay_schedule(1e-2, 9), momentum=0.9),
    "rmsprop": optax.rmsprop(1e-2, centered=True),
    "decay by name": optax.adamw(1e-2, weight_decay=1.0, mask=not_biases),
    "clip of some": optax.partition(
        {
            "a": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-1)),
            "b": optax.sgd(1e-1),
        },
        {"blocks": {"kernel": "a", "bias": "b"}, "table": "b"},
    ),
    "partition": optax.partition(
        {"a": optax.adamw(1e-2), "b": optax.set_to_zero()},
        {"blocks": {"kernel": "a", "bias": "a"}, "table": "b"},
    ),
}
MIXING = {
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "novograd": optax.novograd(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "clip by block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-1)),
    "lamb, decay by name": optax.lamb(1e-2, weight_decay=1.0, mask=not_biases),
    "decay by rank": optax.adamw(
        1e-2,
        weight_decay=1.0,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
    "scaled by width": optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: -x / x.shape[0], updates)
    ),
    "scaled by count": optax.stateless(
        lambda updates, _: jax.tree.map(
            lambda x: -x / len(jax.tree.leaves(updates)), updates
        )
    ),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "line search": optax.lbfgs(),
}


def make_params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        scale = np.arange(1.0, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1))
        return jnp.array(scale * rng.normal(size=shape), jnp.float32)

    kernel, bias = normal(LAYERS, 4, 6), normal(LAYERS, 6)
    return {"blocks": {"kernel": kernel, "bias": bias}, "table": normal(5, 4)}


def loss_of(params):
    return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(params))


def take_steps(tx, params, num_steps=3):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_of)(params)
        extra = {"value": value, "grad": grads, "value_fn": loss_of}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize("name", [*ENTRYWISE, *MIXING])
def test_steps_are_those_of_separate_arrays(name):
    params = make_params()
    tx = (ENTRYWISE | MIXING)[name]
    names = {name: Layers([0] * LAYERS, name) for name in ("kernel", "bias")}
    rows = {"blocks": names, "table": 0}
    expected = put_together(take_steps(tx, take_apart(params, rows)))
    found = take_steps(per_layer_if_needed(tx, params, NAMES), params)
    assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*ENTRYWISE, *MIXING])
def test_dataflow_tells_which_rules_need_it(name):
    assert needs_layers((ENTRYWISE | MIXING)[name], make_params(), NAMES) == (
        name in MIXING
    )


def test_mixing_rules_would_go_wrong_on_the_stack():
    """Else the test above proves nothing."""
    params = make_params()
    for name in ("lamb", "adafactor", "novograd", "clip by block"):
        right = take_steps(per_layer_if_needed(MIXING[name], params, NAMES), params)
        wrong = take_steps(MIXING[name], params)
        difference = jnp.abs(right["blocks"]["kernel"] - wrong["blocks"]["kernel"])
        assert float(difference.max()) > 1e-4, name


def test_the_norm_of_one_stack_is_not_that_of_all():
    params = {"w": jnp.array([[1.0, 1.0], [100.0, 100.0]])}
    tx = per_layer_if_needed(
        optax.clip_by_block_rms(1.0), params, {"w": ("layers", None)}
    )
    found, _ = tx.update(params, tx.init(params))
    np.testing.assert_allclose(found["w"], 1.0)


def test_an_unsuitable_optimizer_is_refused_by_name():
    with pytest.raises(PlanError, match="optimizer='chain\\(scale_by_sophia"):
        per_layer_if_needed(optax.contrib.sophia(1e-2), make_params(), NAMES)
    wrapped = per_layer_if_needed(MIXING["lamb"], make_params(), NAMES)
    assert optimizer_name(wrapped) == optimizer_name(MIXING["lamb"])


def test_without_stacks_nothing_is_wrapped():
    assert per_layer_if_needed(MIXING["lamb"], make_params(), {}) is MIXING["lamb"]
