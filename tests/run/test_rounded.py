"""Runs that learn rounded matrices: refusals, models of users, texts and exports."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zjax
from tests.ops.test_rounding import oracle
from tests.parity import test_lora as lora
from tests.parity.test_qat import make_config
from zjax.errors import ConfigError
from zjax.models.rounded import round_params
from zjax.ops import rounding
from zjax.settings.quantize import Quantize, Rule

INT4 = [{"weights": "int4"}]


def problems_of(make):
    with pytest.raises(ConfigError) as error:
        make()
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"quantize": {"rules": INT4}, "precision": {"matmul_dtype": "float8"}},
            "precision.matmul_dtype='float8' rounds to other codes: quantize is set; "
            "use 'compute', or leave quantize out",
        ),
        (
            {"quantize": {"rules": INT4}, "model": {"mlp_tiles": 2}},
            "model.mlp_tiles=2 gives each tile groups and scales of its own: quantize "
            "is set; use 1, or leave quantize out",
        ),
        (
            {"quantize": {"rules": INT4}, "precision": {"batch_invariant": True}},
            "precision.batch_invariant=True does not hold with quantize='quantize'; "
            "use False, or None there",
        ),
        (
            {"quantize": {"rules": INT4}, "lora": {"form": "dora"}},
            "lora.form='dora' measures columns of matrices that are not rounded: "
            "quantize is set; use 'lora', or leave quantize out",
        ),
        (
            {"quantize": {"rules": INT4}, "lora": {"quantize": "int4"}},
            "lora.quantize='int4' stores codes of matrices, which training rounds "
            "again: quantize is set; use None, or leave quantize out",
        ),
        (
            {"quantize": {"rules": [{"weights": "compute"}]}},
            "quantize.rules=[Rule(pattern='.*', weights='compute', group_size=128, "
            "activations='compute')] rounds nothing; give a rule with weights='int4', "
            "or leave quantize out",
        ),
        (
            {"quantize": {"rules": [{"weights": "int4", "group_size": 1}]}},
            "quantize.rules[0].group_size=1 lets no inputs share a scale; use 2 or "
            "more, or 0 for all inputs of an output",
        ),
        (
            {"quantize": {"rules": [{"weights": "mxfp4"}]}},
            "quantize.rules[0].group_size=128 is no group of weights='mxfp4'; use 32",
        ),
        (
            {"quantize": {"rules": [{"weights": "nf4", "activations": "int8"}]}},
            "quantize.rules[0].activations='int8' has no products with weights='nf4'; "
            "use 'compute', or weights='int4'",
        ),
        (
            {
                "quantize": {"rules": [{"activations": "int8"}]},
                "lora": {"rank": 2},
            },
            "quantize.rules[0].activations='int8' is not built for lora='lora'; use "
            "'compute', or None there",
        ),
        (
            {"quantize": {"rules": [{"pattern": "("}]}},
            "quantize.rules[0].pattern='(' is not a regular expression: missing ), "
            "unterminated subpattern at position 0; correct it, or escape characters "
            "with \\",
        ),
    ],
)
def test_settings_that_do_not_go_with_rounding(settings, expected):
    config = zjax.load_config(settings)
    assert expected in problems_of(lambda: zjax.check_config(config, 1))


def test_an_encoder_is_not_rounded():
    config = zjax.load_config({"model.kind": "encoder", "quantize": {"rules": INT4}})
    expected = (
        "model.kind='encoder' has no rounded matrices: quantize is set; use 'decoder', "
        "or leave quantize out"
    )
    assert expected in problems_of(lambda: zjax.check_config(config, 1))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            [{"pattern": "attn"}],
            "quantize.rules[0].pattern='attn' matches no linear layer; layers look "
            "like blocks/attention/key, blocks/attention/out, blocks/attention/query",
        ),
        (
            [{"pattern": "att"}, {"pattern": "key"}],
            "quantize.rules[1].pattern='key' matches no layer that an earlier rule "
            "leaves; put it before, or leave it out",
        ),
        (
            [{"weights": "mxfp4", "group_size": 32}],
            "quantize.rules[0].weights='mxfp4' needs inputs that 32 divides, not 16; "
            "use 'int4'",
        ),
    ],
)
def test_rules_that_fit_no_layer(rules, expected):
    config = make_config(rules)
    assert expected in problems_of(lambda: zjax.make_model(config))


def test_a_group_of_one_input_is_refused():
    config = make_config(
        [{"weights": "int4", "group_size": 2}],
        model=lora.SHAPE | {"mlp_size": 23},
    )
    assert problems_of(lambda: zjax.make_model(config)) == [
        "quantize.rules[0].group_size=2 lets none of the 23 inputs of blocks/mlp/down "
        "share a scale; use 23, or 0 for one scale of all inputs"
    ]


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, name="out")(x)


def plain():
    def init(key):
        return {"out": {"kernel": jax.random.normal(key, (16, 3))}}

    return init, lambda params, x: x @ params["out"]["kernel"]


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


@pytest.mark.parametrize("make", [Linen, plain, lambda: Nnx], ids=["linen", "", "nnx"])
def test_models_of_users_learn_rounded_matrices(make):
    """Fails if a matrix is not rounded, or the gradient is not of rounded values."""
    rng = np.random.default_rng(0)
    batch = {
        name: np.float32(rng.normal(size=(8, n))) for name, n in (("x", 16), ("y", 3))
    }
    config = {
        "quantize": {"rules": [{"weights": "int3", "group_size": 8}]},
        "precision": {"compute_dtype": "float32"},
        "zero": {"stage": 3, "min_shard_elements": 0},
    }
    run = zjax.initialize(make(), optax.sgd(0.1), loss_fn, batch, config)
    kernel = np.asarray(run.state.master["out"]["kernel"])[:16, :3]
    rounded, _ = oracle(kernel, "int3", 8)
    error = batch["x"] @ rounded - batch["y"]
    state, metrics = run.step(run.state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-5)
    gradient = 2 * batch["x"].T @ error / error.size
    found = np.asarray(state.master["out"]["kernel"])[:16, :3]
    np.testing.assert_allclose(found, kernel - 0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_activations_of_models_of_users_are_refused():
    batch = {"x": np.ones((8, 16), np.float32), "y": np.ones((8, 3), np.float32)}
    config = {"quantize": {"rules": [{"activations": "int8"}]}}
    assert problems_of(
        lambda: zjax.initialize(Linen(), optax.sgd(0.1), loss_fn, batch, config)
    ) == [
        "quantize.rules[0].activations='int8' rounds what enters layers of the "
        "built-in models alone; use 'compute'"
    ]


def test_a_model_that_reads_its_matrices_as_they_are_is_refused():
    """Fails if rules have no effect on given functions, and nobody is told."""
    model = zjax.make_model(make_config(None))
    config = make_config([{"weights": "int4"}])
    expected = (
        "quantize.rules=[Rule(pattern='.*', weights='int4', group_size=128, "
        "activations='compute')] rounds nothing of a zjax.Model, whose functions are "
        "given; use zjax.models.rounded.round_params, or leave quantize out"
    )
    optimizer = zjax.make_optimizer(config, model)
    assert problems_of(lambda: zjax.make_run(config, model, optimizer)) == [expected]


def test_tables_of_embeddings_stay():
    """Fails if a table, whose rows are looked up, is rounded as a matrix."""
    params = {"embedding": jnp.ones((8, 4)) * 0.3, "w": jnp.ones((8, 4))}
    model = zjax.Model(
        init=lambda key: (params, {}),
        loss=lambda params, *others: params,
        bind=lambda params, state: params,
        logical=lambda params: dict.fromkeys(params),
    )
    given = {name: jax.random.normal(jax.random.key(0), (8, 4)) for name in params}
    found = round_params(model, Quantize()).bind(given, {})
    assert (found["embedding"] == given["embedding"]).all()
    assert (found["w"] != given["w"]).any()


def test_a_stack_of_matrices_is_rounded_by_layer():
    """Fails if groups of a model of the user span stacked layers."""
    kernels = jax.random.normal(jax.random.key(0), (2, 6, 4))
    model = zjax.Model(
        init=lambda key: ({"kernel": kernels}, {}),
        loss=lambda params, *others: params,
        bind=lambda params, state: params,
        logical=lambda params: {"kernel": ("layers", None, None)},
    )
    rules = Quantize(rules=(Rule(group_size=0),))
    found = round_params(model, rules).bind({"kernel": kernels}, {})["kernel"]
    for one, both in zip(kernels, found, strict=True):
        np.testing.assert_array_equal(both, rounding.rounded(one, "int4", 0))
