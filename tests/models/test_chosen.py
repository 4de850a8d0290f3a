"""The experts that tokens choose, as the load of the same model counts them."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.models.test_mixture import FOUR, PLAIN
from tests.support import language
from tests.support.first_state import first_weights
from zjax.models.build import make_model
from zjax.moe.router import Router
from zjax.settings import schema
from zjax.stack.forward import named_totals

PYRAMID = FOUR["pyramid-behind-a-dense-one"]
BIASED = dataclasses.replace(
    FOUR["every-second"],
    moe=schema.TokenChoice(
        num_experts=4, every=2, scores="sigmoid", bias_rate=0.1, drop="position"
    ),
)


def count(experts, num_experts):
    return np.bincount(np.ravel(experts), minlength=num_experts).tolist()


@pytest.mark.parametrize("config", [PYRAMID, BIASED], ids=["pyramid", "biased"])
def test_they_add_up_to_the_load(config):
    """Fails if a layer is left out or reads another stream, and if drops count."""
    decoder = language.make_language_model(config)
    batch = language.make_text(config)
    chosen = zjax.chosen_experts(decoder, batch)
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    params = language.params_of(decoder)
    loss = jax.jit(lambda params: model.loss(params, {}, batch, None))(params)
    loads = named_totals(loss.totals)
    expected = [row.tolist() for name in sorted(loads) for row in loads[name]]
    found = [count(x, len(row)) for x, row in zip(chosen, expected, strict=True)]
    assert found == expected
    if config is BIASED:
        return  # what it drops depends on the length
    first = {"tokens": batch["tokens"][:, :3]}
    for some, whole in zip(zjax.chosen_experts(decoder, first), chosen, strict=True):
        np.testing.assert_array_equal(some, whole[:, :3])


def test_a_dense_model_has_none():
    decoder = language.make_language_model(language.GPT)
    assert zjax.chosen_experts(decoder, language.make_text(language.GPT)) == ()


def test_tokens_that_an_expert_did_not_choose_have_none():
    """Fails if expert choice names all experts."""
    router = Router(num_experts=4, choice="experts", capacity_factor=2.0)
    layer = zjax.nnx.MoE(8, router, 16, rngs=nnx.Rngs(0))
    layer.eval()
    x = jax.random.normal(jax.random.key(1), (2, 16, 8))
    found = nnx.jit(lambda layer: layer.chosen_experts(x))(layer)
    assert found.shape == (2, 16, 4)
    places = np.arange(4)[None, None]
    assert ((found == places) | (found == -1)).all()
    assert (found == places).sum((0, 1)).tolist() == [8] * 4
    params = {name: getattr(layer, name)[...] for name in layer.names}
    module = zjax.linen.MoE(router, 16, deterministic=True)
    apply = jax.jit(functools.partial(module.apply, mutable="intermediates"))
    _, sown = apply({"params": params}, x)
    (experts,) = sown["intermediates"]["chosen_experts"]
    np.testing.assert_array_equal(experts, found)


def test_other_models_are_named():
    with pytest.raises(zjax.ModelError) as error:
        zjax.chosen_experts(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {})
    assert str(error.value) == (
        "model='Linear' is not a built-in model; "
        "ask its layers, zjax.nnx.MoE.chosen_experts"
    )


def test_layers_of_users_tell_the_same():
    """Fails if either takes other scores, or noise."""
    router = Router(num_experts=4, top_k=2, sampling="first")
    layer = zjax.nnx.MoE(8, router, 16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    found = nnx.jit(lambda layer: layer.chosen_experts(x))(layer)
    params = {name: getattr(layer, name)[...] for name in layer.names}
    expected = np.argsort(-(x @ params["router_kernel"]), -1)[..., :2]
    np.testing.assert_array_equal(found, expected)
    rngs = {"dropout": jax.random.key(2)}
    module = zjax.linen.MoE(router, 16)
    apply = jax.jit(functools.partial(module.apply, mutable="intermediates"))
    _, sown = apply({"params": params}, x, rngs=rngs)
    (experts,) = sown["intermediates"]["chosen_experts"]
    np.testing.assert_array_equal(experts, found)
    initial = jax.eval_shape(module.init, jax.random.key(0), x)
    assert set(initial) == {"params"}


def test_a_run_on_eight_devices_tells_them():
    """Fails if the model cannot be called where its experts are split."""
    config = zjax.load_config(
        schema.Config(
            model=dataclasses.replace(language.GPT, num_layers=1, moe=PLAIN),
            data=schema.Data(length=8),
        ),
        {"mesh.expert": 2, "zero.stage": 3, "precision.compute_dtype": "float32"},
    )
    batch = language.make_text(config.model, rows=8)
    # Tokens behind a row's last target are chosen for, but are no load.
    batch["weights"] = np.ones_like(batch["weights"])
    model = zjax.make_model(config)
    placed = dataclasses.replace(model, given=lambda: (first_weights(model.init), {}))
    run = zjax.initialize(placed, None, None, batch, config)
    chosen = zjax.chosen_experts(run.bind(run.state), {"tokens": batch["tokens"]})
    _, metrics = run.step(run.state, batch)
    load = np.asarray(metrics["load"]).tolist()
    assert [count(x, 4) for x in chosen] == load


def test_a_linen_run_sows_them():
    """Fails if they are sown in the first call alone, or kept as state."""

    def loss_fn(model, batch, key):
        model(batch["x"])
        y, loss = model(batch["x"])
        return y.mean() + loss

    batch = {"x": jax.random.normal(jax.random.key(1), (8, 3, 8))}
    config = {"mesh.expert": 2, "precision.compute_dtype": "float32"}
    module = zjax.linen.MoE(Router(num_experts=4, top_k=2), 16)
    run = zjax.initialize(module, optax.sgd(0.1), loss_fn, batch, config)
    assert run.state.model_state == {}
    model = run.bind(run.state)
    model(batch["x"])
    (experts,) = model.sown["intermediates"]["chosen_experts"]
    scores = batch["x"] @ model.params["router_kernel"]
    np.testing.assert_array_equal(experts, np.argsort(-scores, -1)[..., :2])
