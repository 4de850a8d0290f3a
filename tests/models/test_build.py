import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from zjax.models.build import make_model
from zjax.models.layers import num_batch_shards
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan

CONFIGS = {"gpt": language.GPT, "llama": language.LLAMA, "bert": language.BERT}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_is_a_mean_with_its_weight(config):
    model = make_model(schema.Config(model=config))
    params = language.params_of(language.make_language_model(config))
    batch = language.make_text(config)
    loss = jax.jit(model.loss)(params, {}, batch, None)
    sums = language.loss_of(model.bind(params, {}), batch)
    np.testing.assert_allclose(loss.value, sums.loss_sum / sums.weight_sum)
    assert float(loss.weight) == float(sums.weight_sum)
    np.testing.assert_allclose(
        loss.metrics["accuracy"], sums.correct_sum / sums.weight_sum
    )


def test_batch_without_a_token_that_counts_loses_nothing():
    """Fails if the mean divides by zero: a NaN would stop the run."""
    model = make_model(schema.Config(model=language.GPT))
    params = language.params_of(language.make_language_model(language.GPT))
    batch = language.make_text(language.GPT)
    batch["weights"] = jnp.zeros_like(batch["weights"])

    @jax.jit
    def gradients(params):
        return jax.grad(lambda params: model.loss(params, {}, batch, None).value)(
            params
        )

    grads = gradients(params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_parameters_know_their_logical_dims():
    model = make_model(schema.Config(model=language.GPT))
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    logical = model.logical(params)
    assert logical["blocks"]["mlp"]["up"]["kernel"] == ("layers", "embed", "mlp")
    assert logical["embedding"]["tokens"] == ("vocab", "embed")


@pytest.mark.parametrize(("batch_size", "expected"), [(16, 4), (6, 2), (1, 1)])
def test_loss_is_cut_by_the_batch_axes_of_the_mesh_in_use(batch_size, expected):
    mesh = meshes.make_mesh(schema.Mesh(tensor=2))
    with jax.set_mesh(mesh):
        assert num_batch_shards(batch_size) == expected
    assert num_batch_shards(batch_size) == 1


@pytest.mark.parametrize("shape", [language.GPT, language.BERT], ids=["gpt", "bert"])
def test_strict_promotion_holds_for_users_alone(shape):
    """Fails if a built-in model, its loss or optimizer is traced by strict rules."""
    moe = schema.TokenChoice(num_experts=2)
    model = dataclasses.replace(shape, moe=moe)
    config = schema.Config(model=model, data=schema.Data(length=8))
    with jax.numpy_dtype_promotion("strict"):
        built = make_model(config)
        params, _ = jax.eval_shape(built.init, jax.random.key(0))
        batch = {name: jnp.zeros((2, 8), jnp.int32) for name in ("tokens", "targets")}
        text = batch if shape.kind == "encoder" else batch["tokens"]

        def compute(params):
            return built.bind(params, {})(text), built.loss(params, {}, batch, None)

        jax.eval_shape(compute, params)
        mesh = meshes.abstract_mesh(config.mesh, 1)
        make_plan(config, mesh, built, make_optimizer(config, built))
