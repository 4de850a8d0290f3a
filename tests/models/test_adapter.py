"""One contract for every way to write a model: these run on all of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zjax.models import adapter

WIDTH, BATCH = 4, 8


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class NnxNet(nnx.Module):
    def __init__(self, width, *, rngs):
        self.dense = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def mean_square(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def linen_loss(view, batch, key):
    return mean_square(view(batch["x"], train=view.train), batch)


def nnx_loss(view, batch, key):
    return mean_square(view(batch["x"]), batch)


def plain_init(key):
    return {"layers": [(jax.random.normal(key, (WIDTH, WIDTH)), jnp.zeros((1, WIDTH)))]}


def plain_apply(params, x, key):
    for kernel, bias in params["layers"]:
        x = x @ kernel + bias
    keep = 1.0 if key is None else jax.random.bernoulli(key, 0.5, x.shape)
    return x * keep


def plain_loss(view, batch, key):
    return mean_square(view(batch["x"], key), batch)


class PlainObject:
    init = staticmethod(plain_init)
    apply = staticmethod(plain_apply)


nnx_factory = functools.partial(NnxNet, WIDTH)
every_kind = pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        pytest.param(LinenNet(), linen_loss, id="linen"),
        pytest.param(nnx_factory, nnx_loss, id="nnx-class"),
        pytest.param(lambda r: nnx_factory(rngs=r), nnx_loss, id="nnx-function"),
        pytest.param(nnx_factory(rngs=nnx.Rngs(3)), nnx_loss, id="nnx-module"),
        pytest.param((plain_init, plain_apply), plain_loss, id="pair-of-functions"),
        pytest.param(PlainObject(), plain_loss, id="object-with-init-and-apply"),
    ],
)
with_norm = pytest.mark.parametrize(
    ("model", "loss_fn", "mean"),
    [
        pytest.param(
            LinenNet(),
            linen_loss,
            lambda s: s["batch_stats"]["BatchNorm_0"]["mean"],
            id="linen",
        ),
        pytest.param(nnx_factory, nnx_loss, lambda s: s["norm"]["mean"], id="nnx"),
    ],
)


@functools.cache
def started_once(model, loss_fn):
    return started(model, loss_fn)


def started(model, loss_fn):
    adapted = adapter.adapt(model, loss_fn, make_batch())
    return adapted, *jax.jit(adapted.init)(jax.random.key(0))


@every_kind
def test_gradients_reach_every_parameter_inside_a_scan(model, loss_fn):
    adapted, params, model_state = started_once(model, loss_fn)

    def value(params, model_state, key):
        loss = adapted.loss(params, model_state, make_batch(), key)
        return loss.value, loss.model_state

    def body(carry, key):
        params, model_state = carry
        grads, model_state = jax.grad(value, has_aux=True)(params, model_state, key)
        return (params, model_state), grads

    keys = jax.random.split(jax.random.key(1), 2)
    _, grads = jax.jit(lambda c: jax.lax.scan(body, c, keys))((params, model_state))
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))


@every_kind
def test_training_draws_by_key_and_evaluation_does_not(model, loss_fn):
    adapted, params, model_state = started_once(model, loss_fn)

    @jax.jit
    def value(key):
        return adapted.loss(params, model_state, make_batch(), key).value

    one, two = jax.random.split(jax.random.key(1))
    assert value(one) == value(one)
    assert value(one) != value(two)
    assert value(None) == value(None)
    assert value(None) not in (value(one), value(two))


@every_kind
def test_bind_is_the_module_in_evaluation(model, loss_fn):
    adapted, params, model_state = started_once(model, loss_fn)
    view = adapted.bind(params, model_state)
    expected = adapted.loss(params, model_state, make_batch(), None).value
    np.testing.assert_allclose(loss_fn(view, make_batch(), None), expected, rtol=1e-6)


@every_kind
def test_trees_hold_plain_containers_with_readable_paths(model, loss_fn):
    adapted, params, model_state = started_once(model, loss_fn)
    for keys, leaf in jax.tree_util.tree_leaves_with_path((params, model_state)):
        assert type(leaf).__module__.startswith("jax")
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        assert not set(path) & set("[]'.()"), path
    logical = jax.tree.leaves(adapted.logical(params), is_leaf=lambda x: x is None)
    assert logical == [None] * len(jax.tree.leaves(params))


@with_norm
def test_batch_norm_learns_in_training_only(model, loss_fn, mean):
    adapted, params, model_state = started_once(model, loss_fn)
    loss = jax.jit(adapted.loss)
    batch, key = make_batch(), jax.random.key(1)
    assert jnp.all(mean(model_state) == 0)
    trained = loss(params, model_state, batch, key).model_state
    assert jnp.all(mean(trained) != 0)
    again = loss(params, trained, batch, key).model_state
    assert jnp.all(mean(again) != mean(trained))
    evaluated = loss(params, trained, batch, None)
    assert jnp.array_equal(mean(evaluated.model_state), mean(trained))
    fresh = loss(params, model_state, batch, None)
    assert evaluated.value != fresh.value


def test_the_same_key_makes_the_same_parameters_and_another_key_others():
    adapted, params, _ = started_once(nnx_factory, nnx_loss)
    same, _ = adapted.init(jax.random.key(0))
    other, _ = adapted.init(jax.random.key(1))
    assert jnp.array_equal(same["dense"]["kernel"], params["dense"]["kernel"])
    assert not jnp.array_equal(other["dense"]["kernel"], params["dense"]["kernel"])


def test_loss_weight_and_metrics_come_out_as_float32_scalars():
    def loss_fn(view, batch, key):
        out = view(batch["x"], key)
        count = jnp.sum(out**2)  # would change the gradient if it were differentiated
        return jnp.float16(mean_square(out, batch)), count, {"hits": jnp.int32(3)}

    adapted, params, model_state = started((plain_init, plain_apply), loss_fn)
    loss = adapted.loss(params, model_state, make_batch(), None)
    for x in (loss.value, loss.weight, loss.metrics["hits"]):
        assert (x.dtype, x.shape) == (jnp.float32, ())
    assert loss.metrics["hits"] == 3

    def weight(params):
        return adapted.loss(params, model_state, make_batch(), None).weight

    assert not jnp.any(jax.grad(weight)(params)["layers"][0][0])


def test_a_bare_loss_weighs_one():
    adapted, params, model_state = started_once((plain_init, plain_apply), plain_loss)
    loss = adapted.loss(params, model_state, make_batch(), None)
    assert (loss.weight, loss.metrics) == (1, {})


def test_the_key_of_the_loss_is_not_the_key_of_the_model():
    seen = []

    def loss_fn(view, batch, key):
        seen.append(key)
        return nnx_loss(view, batch, key)

    adapted, params, model_state = started(nnx_factory, loss_fn)
    key = jax.random.key(1)
    adapted.loss(params, model_state, make_batch(), key)
    adapted.loss(params, model_state, make_batch(), None)
    assert seen[-1] is None
    assert seen[-2] != key


def test_parameters_in_memory_start_a_plain_function():
    params = plain_init(jax.random.key(7))
    adapted, initial, _ = started((params, plain_apply), plain_loss)
    assert adapted.given() == (params, {})
    assert jax.tree.all(jax.tree.map(jnp.array_equal, initial, params))


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, noise):
        return self.norm(self.dense(noise))


def test_a_gan_is_two_models_in_one_loss():
    """A Linen critic beside an NNX generator; each sees the other as a constant."""

    def loss_fn(models, batch, key):
        noise = jax.random.normal(jax.random.key(0) if key is None else key, (8, WIDTH))
        fake = models.generator(noise)
        real_logits = models["critic"](batch["x"])
        fake_logits = models.critic(jax.lax.stop_gradient(fake))
        critic = jnp.mean(jax.nn.softplus(-real_logits) + jax.nn.softplus(fake_logits))
        return critic + jnp.mean(jax.nn.softplus(-models.critic(fake)))

    model = {"generator": Generator, "critic": nn.Dense(1)}
    adapted, params, model_state = started(model, loss_fn)
    assert params.keys() == model_state.keys() == model.keys()
    # The zeros that create the critic must not reach the generator's statistics.
    assert jnp.all(model_state["generator"]["norm"]["var"] == 1)

    def value(params):
        loss = adapted.loss(params, model_state, make_batch(), jax.random.key(1))
        return loss.value, loss.model_state

    grads, after = jax.jit(jax.grad(value, has_aux=True))(params)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))
    assert jnp.any(after["generator"]["norm"]["mean"] != 0)
    views = adapted.bind(params, model_state)
    assert isinstance(views.generator, Generator)
    assert views.critic(make_batch()["x"]).shape == (BATCH, 1)
    with pytest.raises(AttributeError, match="no model is named 'judge'"):
        _ = views.judge


def test_a_frozen_teacher_with_weights_guides_a_new_student():
    teacher = nnx_factory(rngs=nnx.Rngs(7))

    def loss_fn(models, batch, key):
        models.teacher.eval()
        target = jax.lax.stop_gradient(models.teacher(batch["x"]))
        return jnp.mean((models.student(batch["x"]) - target) ** 2)

    adapted, params, model_state = started(
        {"teacher": teacher, "student": nn.Dense(WIDTH)}, loss_fn
    )
    assert adapted.given is None
    kernel = params["teacher"]["dense"]["kernel"]
    assert jnp.array_equal(kernel, teacher.dense.kernel[...])
    tx = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        {"teacher": "freeze", "student": "train"},
    )
    opt_state = tx.init(params)

    def value(params, model_state):
        loss = adapted.loss(params, model_state, make_batch(), jax.random.key(1))
        return loss.value, loss.model_state

    losses = []
    grad = jax.jit(jax.value_and_grad(value, has_aux=True))
    for _ in range(3):
        (loss, model_state), grads = grad(params, model_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    assert jnp.array_equal(params["teacher"]["dense"]["kernel"], kernel)
    assert isinstance(teacher.norm.mean[...], jax.Array)
    assert jnp.all(teacher.norm.mean[...] == 0)


def test_a_dict_of_loaded_models_gives_all_their_weights():
    model = {n: nnx_factory(rngs=nnx.Rngs(i)) for i, n in enumerate("ab")}

    def loss_fn(models, batch, key):
        return nnx_loss(models.a, batch, key) + nnx_loss(models.b, batch, key)

    adapted = adapter.adapt(model, loss_fn, make_batch())
    params, model_state = adapted.given()
    assert params["b"]["dense"]["kernel"] is model["b"].dense.kernel[...]
    assert model_state.keys() == {"a", "b"}
