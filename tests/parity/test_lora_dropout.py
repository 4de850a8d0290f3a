"""Inputs of adapters are dropped alike on every mesh, and by nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parity import test_lora as plain
from tests.support import language
from zjax.models import layers, lora
from zjax.models.build import make_model
from zjax.models.latent import LatentAttention
from zjax.ops.keys import fold_name
from zjax.settings import convert, schema

SHAPE = plain.SHAPE | {"remat": "none", "layers_per_scan": 1}
ADAPTERS = {"rank": plain.RANK, "alpha": plain.ALPHA}
STATE = {"stage": 3, "min_shard_elements": 0}


def make_config(rate, model=SHAPE, **settings):
    adapters = ADAPTERS | {"dropout": rate}
    return plain.make_config(lora=adapters, model=model, num_microbatches=2, **settings)


@pytest.fixture(scope="module")
def expected():
    """Losses of SGD on one device, which differentiates the loss of the model."""
    model, batch = make_model(make_config(0.5)), plain.make_batch()
    parts = [
        {name: jnp.asarray(x[i::2]) for name, x in batch.items()} for i in range(2)
    ]

    @jax.jit
    @jax.value_and_grad
    def differentiate(params, key):
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        losses = [
            model.loss(params, {}, part, key).value
            for part, key in zip(parts, keys, strict=True)
        ]
        return sum(losses) / 2

    params, losses = plain.first_params(make_config(0.5)), []
    for step in range(plain.STEPS):
        key = jax.random.fold_in(jax.random.key(0), step)
        loss, grads = differentiate(params, key)
        params = jax.tree_util.tree_map_with_path(
            lambda k, x, g: x - plain.RATE * g if plain.is_adapter(k) else x,
            params,
            grads,
        )
        losses.append(float(loss))
    return losses


RECOMPUTED = {"model": SHAPE | {"remat": "full"}, "zero": STATE}


def test_dropout_changes_training_alone(expected):
    """Fails if adapters are dropped in evaluation, or trained without a mask, or if a
    recomputed block draws another one."""
    batch, run = plain.make_batch(), plain.run_of(make_config(0.5, **RECOMPUTED))
    model, state, evaluated = make_model(make_config(0.0)), run.state, []
    arrays = jax.tree.map(jnp.asarray, batch)
    for step in range(plain.STEPS):
        if step == 2:
            params = run.step.parameters(state)
            loss = jax.jit(lambda params: model.loss(params, {}, arrays, None).value)
            evaluated = [run.evaluate(state, batch)["loss"], loss(params)]
        state, metrics = run.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected[step], rtol=1e-5)
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    assert abs(expected[2] - float(evaluated[0])) > 1e-3


def test_mask_zeroes_what_enters_the_adapter_alone():
    """Fails if the frozen product is dropped, or two adapters draw the same mask."""
    settings = schema.Lora(rank=2, alpha=4.0, dropout=0.25)
    x = jax.random.normal(jax.random.key(1), (2, 64, 16))
    config, key = convert.from_mapping(schema.Model, SHAPE), jax.random.key(2)
    masks = []
    dims = (("embed", 16),), (("mlp", 32),)
    for name in ("up", "gate"):
        layer = layers.Linear(*dims, use_bias=False, rngs=nnx.Rngs(0))
        a = jax.random.normal(jax.random.key(3), (16, 2))
        b = jax.random.normal(jax.random.key(4), (2, 32))
        adapter = lora.Adapter({"a": a, "b": b}, settings, f"mlp/{name}")
        layer.lora = nnx.data(adapter)
        dropped = layers.AdapterDropout(key, config)
        found = layer(x, adapter_dropout=dropped)
        mask_key = fold_name(key, f"mlp/{name}/lora")
        kept = layers.dropout(jnp.ones_like(x), config, mask_key, 0.25)
        wanted = x @ layer.kernel[...] + 2.0 * (x * kept) @ a @ b
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        masks.append(kept > 0)
    assert 0.7 < float(masks[0].mean()) < 0.8
    assert 0.55 < float((masks[0] == masks[1]).mean()) < 0.7


@pytest.mark.parametrize(
    ("attention", "config"),
    [
        (layers.Attention, language.LLAMA),
        (
            functools.partial(LatentAttention, latent=language.LATENT.latent),
            language.LATENT,
        ),
    ],
)
def test_every_adapter_of_attention_gets_a_mask(attention, config):
    """Fails if a projection runs its adapter on all of its input in training."""
    model, seen = attention(config, out_std=1.0, rngs=nnx.Rngs(0)), set()

    class Recorded(layers.AdapterDropout):
        def __call__(self, x, path, rate):
            assert rate == 0.5
            seen.add(path.removesuffix("/lora"))
            return x

    settings = schema.Lora(rank=2, dropout=0.5, targets=(".*",))
    lora.attach(model, jax.random.key(0), settings=settings)
    adapters = {path[0] for path, _ in nnx.iter_modules(model) if "lora" in path}
    x = jnp.ones((1, 4, config.embed_size))
    turns = (jnp.ones((1, 4, config.rotary.size // 2)),) * 2
    drop = Recorded(jax.random.key(0), config)
    model(x, turns, lambda q, k, v, _: (q[..., : v.shape[-1]], None), drop)
    assert len(seen) >= 4 and seen == adapters
