"""The built-in models with their blocks' matrices in float8."""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language, small_run
from tests.support.first_state import first_weights
from zjax.errors import ConfigError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.batch import abstract_batch
from zjax.run.step import make_step
from zjax.run.trainer import Trainer
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans

FORMS = {
    name: dataclasses.replace(config, embed_size=64, mlp_size=128)
    for name, config in {"llama": language.LLAMA, "bert": language.BERT}.items()
}


def lower_gradients(config, matmul_dtype="float8"):
    """Loss and gradients of a model that a run would start with, and what they take."""
    precision = schema.Precision(matmul_dtype=matmul_dtype)
    model = make_model(schema.Config(model=config, precision=precision))
    weights = first_weights(model.init, deviation=0.02)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    inputs = params, language.make_text(config)

    def loss(params, batch):
        return model.loss(params, {}, batch, jax.random.key(1)).value

    return jax.jit(jax.value_and_grad(loss)).lower(*inputs), inputs


def count_products(lowered):
    """Matrix products by the number of operands in float8."""
    text = lowered.as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return collections.Counter(
        line.rpartition(" : (")[2].partition(") ->")[0].count("xf8")
        for line in products
    )


def flat(tree):
    return np.concatenate(
        [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    )


@pytest.mark.parametrize(("form", "num_matrices"), [("llama", 7), ("bert", 6)])
def test_blocks_multiply_float8_and_the_rest_does_not(form, num_matrices):
    """Three products per matrix, and gradients that point where bfloat16 ones do."""
    config = FORMS[form]
    (mixed, inputs), (wide, _) = (
        lower_gradients(config, matmul_dtype) for matmul_dtype in ("float8", "compute")
    )
    total, changed = count_products(wide)[0], 3 * num_matrices * config.num_layers
    assert count_products(wide) == {0: total}
    assert count_products(mixed) == {0: total - changed, 2: changed}
    loss, grads = mixed.compile()(*inputs)
    wide_loss, wide_grads = wide.compile()(*inputs)
    np.testing.assert_allclose(loss, wide_loss, rtol=1e-3)
    grads, wide_grads = flat(grads), flat(wide_grads)
    sizes = np.linalg.norm(grads) * np.linalg.norm(wide_grads)
    assert 0.99 < grads @ wide_grads / sizes < 0.99999


@pytest.fixture(scope="module")
def unrolled():
    lowered, inputs = lower_gradients(FORMS["llama"])
    return lowered.compile()(*inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"},
        pytest.param({"layers_per_scan": 1}, marks=pytest.mark.slow),
        {"layers_per_scan": 1, "remat": "attention_and_mlp"},
    ],
    ids=str,
)
def test_recomputation_and_loops_change_nothing(unrolled, changes):
    lowered, inputs = lower_gradients(dataclasses.replace(FORMS["llama"], **changes))
    loss, grads = lowered.compile()(*inputs)
    np.testing.assert_allclose(loss, unrolled[0], rtol=1e-3)
    # A loop stacks the layers: the same numbers in another order.
    found, expected = (np.sort(flat(tree)) for tree in (grads, unrolled[1]))
    error = np.linalg.norm(found - expected)
    assert error <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(("stage", "allowed"), [(2, 0), (3, 2)])
def test_devices_agree_on_no_scale(tmp_path, stage, allowed):
    """Fails if magnitudes are compared over devices: one reduction per operand.

    At stage 3 the compiler may look for those of the weights where they are split.
    """
    config = small_run.make_config(
        tmp_path,
        "precision.matmul_dtype=float8",
        f"zero.stage={stage}",
        "model.dropout_rate=0",
    )
    model, mesh = make_model(config), meshes.make_mesh(config.mesh)
    tx = make_optimizer(config, model)
    plan = plans.make_plan(config, mesh, model, tx)
    step = make_step(model, tx, plan, config)
    text = step.compile(abstract_batch(config, plan)).as_text()
    reductions = [line for line in text.splitlines() if " all-reduce(" in line]
    assert reductions
    assert sum("reduce_max" in line for line in reductions) <= allowed


def test_a_gpu_without_float8_is_refused_before_anything_else(tmp_path):
    """Fails if a run does not ask its devices."""
    client = types.SimpleNamespace(platform_version="cuda 13000")
    old = types.SimpleNamespace(platform="gpu", client=client, compute_capability="8.0")
    config = small_run.make_config(tmp_path / "run", "precision.matmul_dtype=float8")
    with pytest.raises(ConfigError, match="needs compute capability 8"):
        Trainer(config, devices=[old] * 8)
    assert not (tmp_path / "run").exists()
