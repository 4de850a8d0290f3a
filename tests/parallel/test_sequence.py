"""Which way attention goes, what it says of it, and where it works."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support import language
from tests.support.trees import assert_close
from zjax.errors import ConfigError, PlanError
from zjax.models.stack import make_stack
from zjax.parallel import sequence
from zjax.run.initialize import initialize
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.layers import layers_of

LENGTH = 16


def make_batch(length=LENGTH):
    return language.make_text(language.LLAMA, rows=4, length=length)


@functools.cache
def make_model(way="auto", **settings):
    config = dataclasses.replace(
        language.LLAMA, sequence_attention=way, remat="none", **settings
    )
    return language.make_language_model(config)


def logits(model, batch):
    return model(batch["tokens"])


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_logits_come_in_the_order_of_the_tokens(way):
    model, batch = make_model(way), make_batch()
    expected = language.logits_of(make_model(), batch)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(sequence=4))):
        found = language.logits_of(model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_a_block_runs_where_another_axis_is_split_by_hand(way):
    """As the blocks of a pipeline do, each device of which has other rows here."""
    model = make_model(way)
    stack, params = make_stack(model), language.params_of(model)
    embed, (blocks,), _ = stack.split(params)
    batch = make_batch()
    (segment,) = stack.segments
    first, _ = layers_of(blocks, segment.num_blocks)

    def run(embed, block, tokens):
        x, context = stack.embed(embed, {"tokens": tokens}, None)
        return segment.block(block, x, context, None)[0]

    def loss(run, *args):
        return jnp.mean(run(*args) ** 2)

    args = embed, first, batch["tokens"]
    expected = jax.jit(jax.grad(functools.partial(loss, run), (0, 1)))(*args)
    mesh = meshes.make_mesh(schema.Mesh(pipeline=2, sequence=2, tensor=2))
    by_hand = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(), P(), P(meshes.PIPELINE)),
        out_specs=P(meshes.PIPELINE),
        axis_names={meshes.PIPELINE},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.grad(functools.partial(loss, by_hand), argnums=(0, 1)))
        text = gradients.lower(*args).compile().as_text()
        found = gradients(*args)
    assert ("all-to-all" if way == "ulysses" else "collective-permute") in text
    config = model.config
    assert f"f32[2,{LENGTH // 2},{config.mlp_size // 2}]" in text
    assert f"f32[2,{LENGTH},{config.mlp_size}]" not in text
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_way_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(
        sequence.logging, "warning", lambda text, *x: said.append(text % x)
    )
    sequence._log.cache_clear()
    model, batch = make_model(), make_batch()
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(sequence=8))):
        jax.eval_shape(functools.partial(logits, model), batch)
    assert said == ["sequence attention: ring (4 heads over sequence=8)"]


@pytest.mark.parametrize(
    ("settings", "length", "message"),
    [
        (
            {},
            12,
            "length=12 is not a multiple of 16, twice mesh.sequence=8, as causal ring "
            "attention needs; use 16",
        ),
        (
            {"way": "ulysses"},
            16,
            "model.sequence_attention='ulysses' cannot split model.num_heads=4 over "
            "mesh.tensor * mesh.sequence=8; use 'ring', or a multiple of 8 heads",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_when_it_is_traced(settings, length, message):
    """Lengths come from the batches of the caller."""
    model, batch = make_model(**settings), make_batch(length)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(sequence=8))):
        with pytest.raises(ConfigError) as error:
            jax.eval_shape(functools.partial(logits, model), batch)
    assert str(error.value) == message


class Mean(nnx.Module):
    """A model of the caller's own, of tokens that know nothing of each other."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def mean_loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2)


def test_a_model_of_the_callers_own_gets_its_tokens_in_parts():
    batch = {"x": np.ones((2, 8, 8), np.float32)}
    config = {"mesh.sequence": 4, "precision.compute_dtype": "float32"}
    run = initialize(Mean, None, mean_loss, batch, config)
    placed = run.step.place_batch(batch)["x"]
    assert placed.addressable_shards[0].data.shape == (1, 2, 8)
    _, metrics = run.step(run.state, batch)
    alone = initialize(Mean, None, mean_loss, batch, {}, devices=jax.devices()[:1])
    _, expected = alone.step(alone.state, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-2)


def test_a_batch_that_does_not_divide_is_refused_by_name():
    batch = {"x": np.ones((2, 6, 8), np.float32)}
    run = initialize(Mean, None, mean_loss, batch, {"mesh.sequence": 4})
    message = (
        "batch/x=(2, 6, 8) does not divide over mesh.sequence=4; use a multiple of 4 "
        "as its second dim, or mesh.sequence=1"
    )
    for call in (run.step.place_batch, run.step.compile):
        with pytest.raises(PlanError) as error:
            call(batch)
        assert str(error.value) == message
