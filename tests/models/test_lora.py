"""Adapters in the layers of users' Flax modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from zjax.errors import ConfigError, ModelError
from zjax.models import lora
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.weights.adapters import merged_kernel

X = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)
BATCH = {"x": X, "y": np.float32(X[:, 0, :3] ** 2)}


class Linen(nn.Module):
    """Layers with several input and output dims, with and without bias."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.DenseGeneral((2, 6), name="heads")(x))
        x = nn.tanh(nn.DenseGeneral(5, axis=(-2, -1), use_bias=False, name="mix")(x))
        return nn.Dense(3, name="out")(x.mean(axis=1))


class NNX(nnx.Module):
    """The same layers."""

    def __init__(self, rngs):
        self.heads = nnx.LinearGeneral(6, (2, 6), rngs=rngs)
        self.mix = nnx.LinearGeneral(
            (2, 6), 5, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.out = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.mix(nnx.tanh(self.heads(x))))
        return self.out(x.mean(axis=1))


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def loss_of_two(models, batch, key):
    return loss_fn(models.first, batch, key) + loss_fn(models.second, batch, key)


def start(model, adapters, loss=loss_fn):
    settings = {"lora": adapters, "precision": {"compute_dtype": "float32"}}
    return zjax.initialize(model, optax.sgd(0.5), loss, BATCH, settings)


def merged(tree, settings):
    """The tree of the module without adapters."""
    if not isinstance(tree, dict):
        return tree
    if "lora" not in tree:
        return {name: merged(x, settings) for name, x in tree.items()}
    kernel = merged_kernel(tree["kernel"], tree["lora"], settings)
    return {n: x for n, x in tree.items() if n != "lora"} | {"kernel": kernel}


def plain_output(model, params):
    if isinstance(model, nn.Module):
        return model.apply({"params": params}, X)
    module = model(nnx.Rngs(0)) if isinstance(model, type) else nnx.clone(model)
    nnx.update(module, nnx.State(params))
    return module(X)


def test_a_column_of_zeros_stays_one():
    """As those of a padded vocabulary; fails if it is divided by its length of zero."""
    settings = schema.Lora(rank=2, form="dora")
    kernel = jnp.array([[1.0, 0.0], [2.0, 0.0]])
    adapter = lora.make_matrices(jax.random.key(0), kernel, 1, 1, settings)

    def outputs(adapter):
        x = jnp.ones((1, 2))
        return lora.adapt_product(x @ kernel, x, kernel, adapter, settings)

    np.testing.assert_allclose(outputs(adapter), [[3.0, 0.0]], rtol=1e-6)
    matrices = jax.tree.map(np.asarray, adapter)
    merged = merged_kernel(np.asarray(kernel), matrices, settings)
    np.testing.assert_allclose(merged, kernel, rtol=1e-6)
    grads = jax.grad(lambda adapter: outputs(adapter).sum())(adapter)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("form", ["lora", "dora"])
@pytest.mark.parametrize("make", [Linen, lambda: NNX, lambda: NNX(nnx.Rngs(1))])
def test_merged_weights_compute_what_adapters_do(form, make):
    """Fails if a call passes an adapter by, or one has other dims or another factor."""
    model, settings = make(), schema.Lora(rank=2, alpha=6.0, form=form)
    run = start(model, {"rank": 2, "alpha": 6.0, "form": form})
    plain = start(model, {})
    state, before = run.state, jax.tree.map(np.asarray, run.state.master)
    first = run.evaluate(state, BATCH)["loss"]
    np.testing.assert_allclose(first, plain.evaluate(plain.state, BATCH)["loss"], 1e-5)
    for _ in range(3):
        state, _ = run.step(state, BATCH)
    after = jax.tree.map(np.asarray, state.master)
    for name in ("heads", "mix", "out"):
        np.testing.assert_array_equal(after[name]["kernel"], before[name]["kernel"])
        for matrix, x in after[name]["lora"].items():
            assert not np.array_equal(x, before[name]["lora"][matrix]), (name, matrix)
    weights = merged(after, settings)
    expected = plain_output(model, weights)
    assert np.abs(expected - plain_output(model, merged(before, settings))).max() > 0.1
    np.testing.assert_allclose(run.bind(state)(X), expected, rtol=1e-4, atol=1e-5)


class DenseAndScale(nn.Dense):
    """A layer whose output no merged matrix gives."""

    def __call__(self, inputs):
        return nn.tanh(super().__call__(inputs))


class LinearAndScale(nnx.Linear):
    """The same in NNX."""

    def __call__(self, inputs):
        return nnx.tanh(super().__call__(inputs))


class NamedDense(nn.Dense):
    """A subclass with the call of Flax."""


class NamedLinear(nnx.Linear):
    """The same in NNX."""


class LinenBranches(nn.Module):
    """Layers of Flax, of subclasses, and of other products."""

    kind: type = NamedDense

    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((6, 5), "...i,ij->...j", name="product")(x)
        return self.kind(3, name="out")(nn.Dense(5, name="in")(x).mean(axis=1))


class NNXBranches(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs, kind=NamedLinear):
        self.product = nnx.Einsum("...i,ij->...j", (6, 5), (5,), rngs=rngs)
        self.inner = nnx.Linear(5, 5, rngs=rngs)
        self.out = kind(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.inner(self.product(x)).mean(axis=1))


@pytest.mark.parametrize(
    ("model", "name", "base"),
    [
        (LinenBranches(DenseAndScale), "DenseAndScale", "Dense"),
        (lambda rngs: NNXBranches(rngs, LinearAndScale), "LinearAndScale", "Linear"),
    ],
)
def test_a_layer_with_another_call_is_refused(model, name, base):
    """Fails if its adapter is added to what no merged matrix gives."""
    with pytest.raises(ConfigError) as caught:
        start(model, {"rank": 2})
    assert str(caught.value) == (
        f"out='{name}' overrides the call of {base}, so that no adapter could be "
        "merged into it; match other layers by lora.targets, or call a Flax layer "
        "inside a module"
    )


@pytest.mark.parametrize("model", [LinenBranches(), NNXBranches])
def test_a_subclass_with_the_call_of_flax_is_adapted_and_other_products_are_told(
    model, caplog
):
    params, _ = jax.eval_shape(
        zjax.adapt(model, loss_fn, BATCH, adapters=schema.Lora(rank=2)).init,
        jax.random.key(0),
    )
    assert {name for name, x in params.items() if "lora" in x} >= {"out"}
    assert "lora" not in params["product"]
    assert caplog.messages == [
        "lora: frozen and without adapter, as their layers take none: "
        "product/kernel[6, 5]"
    ]


def test_patterns_choose_layers_and_what_else_is_trained():
    """Fails if patterns are not read, or see no name of a dict of models."""
    adapters = {
        "rank": 1,
        "targets": ("second/out",),
        "also_train": ("first/out/bias",),
    }
    run = start({"first": Linen(), "second": NNX}, adapters, loss_of_two)
    rows = jax.tree_util.tree_leaves_with_path(run.plan.master)
    trained = ["/".join(key.key for key in k) for k, row in rows if not row.is_frozen]
    assert trained == ["first/out/bias", "second/out/lora/a", "second/out/lora/b"]


@pytest.mark.parametrize("model", [Linen(), NNX])
def test_pattern_without_a_layer_is_refused(model):
    """Fails if a mistyped target trains less than was meant."""
    with pytest.raises(ConfigError) as caught:
        start(model, {"rank": 2, "targets": ("out", "ouput")})
    assert str(caught.value) == (
        "lora.targets='ouput' matches no linear layer; layers look like heads, mix, out"
    )


@pytest.mark.parametrize("model", [Linen(), NNX])
def test_what_else_is_trained_must_be_there(model):
    """Fails if a mistyped pattern trains nothing, as one of a matrix of an adapter."""
    patterns = ("out/bias", "out/biass", "lora/a")
    with pytest.raises(ConfigError) as caught:
        start(model, {"rank": 2, "targets": ("ouput",), "also_train": patterns})
    assert str(caught.value) == (
        "lora.targets='ouput' matches no linear layer; layers look like "
        "heads, mix, out\n"
        "lora.also_train='out/biass' matches no parameter; parameters look like "
        "heads/bias, heads/kernel, mix/kernel\n"
        "lora.also_train='lora/a' matches no parameter; parameters look like "
        "heads/bias, heads/kernel, mix/kernel"
    )


def test_built_in_model_refuses_what_else_is_trained_but_is_not_there():
    lora = schema.Lora(rank=2, also_train=("headd",))
    with pytest.raises(ConfigError) as caught:
        make_model(schema.Config(lora=lora))
    assert str(caught.value) == (
        "lora.also_train='headd' matches no parameter; parameters look like "
        "blocks/attention/key/bias, blocks/attention/key/kernel, "
        "blocks/attention/out/bias"
    )


def test_built_in_model_refuses_a_pattern_without_a_layer():
    """Fails if a router or a table counts as a layer."""
    config = schema.Config(lora=schema.Lora(rank=2, targets=("embedding",)))
    with pytest.raises(ConfigError) as caught:
        make_model(config)
    assert str(caught.value) == (
        "lora.targets='embedding' matches no linear layer; layers look like "
        "blocks/attention/key, blocks/attention/out, blocks/attention/query"
    )


def test_users_matrices_are_not_quantised():
    """Fails if codes are asked for and silently missing."""
    with pytest.raises(ConfigError) as caught:
        start(NNX, {"rank": 2, "quantize": "int8"})
    assert str(caught.value) == (
        "lora.quantize='int8' quantises no matrix but those of the built-in models; "
        "leave it out, or give zjax.make_model(config)"
    )


def test_blocks_are_as_large_as_divides_the_inputs():
    """The default does for heads of 80 channels, and for a few inputs."""
    shape = schema.Model(num_layers=1, embed_size=160, num_heads=2, mlp_size=23)
    config = schema.Config(
        model=shape, lora=schema.Lora(rank=2, quantize=schema.Int8())
    )
    params, _ = jax.eval_shape(make_model(config).init, jax.random.key(0))
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    assert shapes["blocks/attention/query/scales"][-3:] == (160 // 40, 2, 80)
    assert shapes["blocks/attention/out/scales"][-3:] == (2, 80 // 40, 160)
    assert shapes["blocks/mlp/down/scales"][-2:] == (1, 160)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"quantize": schema.Int4(block_size=3)},
            "lora.quantize.block_size=3 lets none of the 5 inputs of "
            "blocks/attention/out share a scale; use 7 or more",
        ),
        (
            {"quantize": schema.Int4(), "also_train": ("blocks",)},
            "lora.quantize='int4' quantises no matrix, as lora.also_train names all of "
            "them; leave it out",
        ),
    ],
)
def test_blocks_that_fit_no_matrix_are_refused(settings, expected):
    """Fails if a matrix stays as it is, although codes were asked for."""
    adapters = schema.Lora(rank=2, **settings)
    shape = schema.Model(num_layers=1, embed_size=10, num_heads=2, mlp_size=77)
    with pytest.raises(ConfigError) as caught:
        make_model(schema.Config(model=shape, lora=adapters))
    assert str(caught.value) == expected


def test_model_of_functions_is_refused():
    """Fails if adapters are asked for and silently missing."""
    config = schema.Config()
    batch = {
        "tokens": np.zeros((8, 4), np.int32),
        "targets": np.zeros((8, 4), np.int32),
    }
    settings = {"lora": {"rank": 2}}
    with pytest.raises(ConfigError) as caught:
        zjax.initialize(make_model(config), optax.sgd(0.1), None, batch, settings)
    assert str(caught.value) == (
        "lora.rank=2 adds no adapters to a zjax.Model, whose functions are given; use "
        "zjax.adapt(..., adapters=config.lora), or leave lora out"
    )
    functions = (lambda key: jnp.ones((6, 3)), lambda w, x: x.mean(axis=1) @ w)
    with pytest.raises((ConfigError, ModelError)) as caught:
        start(functions, settings["lora"])
    assert str(caught.value) == (
        "lora.targets='.*' matches no linear layer; give a Flax module with linear "
        "layers"
    )


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (
            None,
            "lora.rank=2 adds no adapters to a zjax.Model, whose functions are given; "
            "use zjax.adapt(..., adapters=config.lora), or leave lora out",
        ),
        (
            schema.Lora(rank=3),
            "lora.rank=2 is not the rank of the model's adapters (3); give zjax.adapt "
            "and the run the same settings",
        ),
        (
            schema.Lora(rank=2, form="dora"),
            "lora.form='lora' is not the form of the model's adapters; give zjax.adapt "
            "and the run the same settings",
        ),
    ],
)
def test_trainer_refuses_a_model_without_the_adapters_of_its_settings(
    adapters, message, tmp_path
):
    """Fails if a run freezes all parameters and trains nothing."""
    with pytest.raises(ConfigError) as caught:
        start_trainer(tmp_path, adapters)
    assert str(caught.value) == message


def test_trainer_trains_the_adapters_of_an_adapted_model(tmp_path):
    trainer = start_trainer(tmp_path, schema.Lora(rank=2))
    before = jax.tree.map(np.asarray, trainer.state.master)
    after = trainer.fit().master
    trainer.close()
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    paths = jax.tree_util.tree_leaves_with_path(moved)
    assert {k[-1].key for k, is_moved in paths if is_moved} == {"b"}


def start_trainer(directory, adapters):
    settings = {
        "directory": str(directory),
        "num_steps": 1,
        "global_batch_size": 8,
        "lora": {"rank": 2},
        "observe": {"sinks": ()},
    }
    model = zjax.adapt(NNX, loss_fn, BATCH, adapters=adapters)
    batches = [BATCH]
    return zjax.Trainer(settings, model=model, tx=optax.sgd(0.5), batches=batches)


def test_equal_blocks_with_adapters_have_one_structure():
    """Fails if users cannot stack blocks: adapters that draw by paths are others."""
    settings = schema.Lora(rank=2)
    blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
    module = nnx.List(blocks)
    lora.attach(module, jax.random.key(0), settings=settings)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *module)
    assert stacked.lora.a.shape == (2, 4, 2)
