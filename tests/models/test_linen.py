"""What is particular to Linen: variables by calling, streams, boxes and sown values."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.errors import ModelError
from zjax.models import adapter, submodel

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 12


def started(module, loss_fn, batch=X):
    adapted = adapter.adapt(module, loss_fn, batch)
    return adapted, *jax.jit(adapted.init)(jax.random.key(0))


class Autoencoder(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(2)
        self.decoder = nn.Dense(4)
        self.norm = nn.BatchNorm(use_running_average=False)

    def encode(self, x):
        return self.norm(self.encoder(x))

    def decode(self, z):
        return self.decoder(z)


def test_a_variational_autoencoder_calls_two_methods_and_draws_from_its_own_key():
    def loss_fn(view, batch, key):
        code = view(batch, method="encode")
        if key is not None:
            code += jax.random.normal(key, code.shape)
        return jnp.mean((view(code, method=Autoencoder.decode) - batch) ** 2)

    adapted, params, model_state = started(Autoencoder(), loss_fn)
    assert params.keys() == {"encoder", "decoder", "norm"}
    assert jnp.all(model_state["batch_stats"]["norm"]["var"] == 1)
    one, two = jax.random.split(jax.random.key(1))
    values = [
        adapted.loss(params, model_state, X, key).value for key in (one, one, two)
    ]
    assert values[0] == values[1] != values[2]


def test_statistics_of_two_calls_in_one_loss_follow_one_another():
    def once(view, batch, key):
        return jnp.mean(view(batch, method="encode") ** 2)

    def twice(view, batch, key):
        return once(view, batch, key) + once(view, batch, key)

    key = jax.random.key(1)
    adapted, params, model_state = started(Autoencoder(), once)
    after = model_state
    for _ in range(2):
        after = adapted.loss(params, after, X, key).model_state
    adapted, _, _ = started(Autoencoder(), twice)
    both = adapted.loss(params, model_state, X, key).model_state
    jax.tree.map(np.testing.assert_array_equal, both, after)
    assert jnp.all(both["batch_stats"]["norm"]["mean"] != 0)


class Sower(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        count = self.variable("counters", "calls", lambda: jnp.int32(0))
        if self.is_mutable_collection("counters") and not self.is_initializing():
            count.value += 1
        self.sow("losses", "size", jnp.sum(scale**2))
        self.sow("intermediates", "mean", jnp.mean(x))
        self.sow("of_any_name", "two", 2.0)
        self.perturb("nudge", x)
        return x * scale


@pytest.mark.parametrize(
    "key", [jax.random.key(1), None], ids=["training", "evaluation"]
)
def test_sown_values_reach_the_loss_and_are_not_kept(key):
    def loss_fn(view, batch, key):
        main = jnp.mean(view(batch))
        view(batch)
        sizes = view.sown["losses"]["size"]
        two = sum(view.sown["of_any_name"]["two"])
        mean = view.sown["intermediates"]["mean"][0]
        return main + sum(sizes), 1.0, {"two": two, "num": len(sizes), "mean": mean}

    adapted, params, model_state = started(Sower(), loss_fn)
    assert model_state == {"counters": {"calls": 0}}
    loss = adapted.loss(params, model_state, X, key)
    assert loss.model_state == {"counters": {"calls": 0 if key is None else 2}}
    assert loss.metrics == {"two": 4, "num": 2, "mean": X.mean()}
    np.testing.assert_allclose(loss.value, X.mean() + 2, rtol=1e-6)
    # d/ds of s * mean(x) and of two auxiliary losses s ** 2, at s = 1.
    grads = jax.grad(lambda p: adapted.loss(p, model_state, X, key).value)(params)
    np.testing.assert_allclose(grads["scale"], X.mean() + 4, rtol=1e-6)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        dropout = jax.random.normal(self.make_rng("dropout"))
        return x * scale, dropout, jax.random.normal(self.make_rng("jitter"))


def test_streams_differ_by_name_and_by_call():
    def loss_fn(view, batch, key):
        x, *first = view(batch)
        _, *second = view(batch)
        return jnp.mean(x), 1.0, dict(zip("abcd", (*first, *second), strict=True))

    adapted, params, model_state = started(Noisy(), loss_fn)
    metrics = adapted.loss(params, model_state, X, jax.random.key(1)).metrics
    assert len({float(x) for x in metrics.values()}) == 4


class Named(nn.Module):
    box: str

    @nn.compact
    def __call__(self, x):
        box = getattr(nn, self.box)
        kernel = box(nn.initializers.lecun_normal(), ("embed", "mlp"))
        bias = box(nn.initializers.ones, ("mlp",))
        x = nn.Dense(2, kernel_init=kernel, bias_init=bias)(x)
        return nn.Dense(1, use_bias=False)(x)


@pytest.mark.parametrize("box", ["with_partitioning", "with_logical_partitioning"])
def test_boxes_give_logical_names_and_leave_plain_arrays(box):
    def loss_fn(view, batch, key):
        return jnp.mean(view(batch) ** 2)

    adapted, params, model_state = started(Named(box), loss_fn)
    assert adapted.logical(params) == {
        "Dense_0": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
        "Dense_1": {"kernel": None},
    }
    assert params["Dense_0"]["kernel"].shape == (4, 2)
    assert jnp.isfinite(adapted.loss(params, model_state, X, None).value)


def test_boxes_constrain_again_once_the_code_of_a_user_has_run():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    box = nn.Partitioned(jnp.ones((2, 2)), ("mlp", None))
    with jax.set_mesh(mesh):
        with submodel.names_only():
            assert box.unbox() is box.value
        with pytest.raises(ValueError, match="mlp"):
            box.unbox()


def test_frozen_dicts_become_plain_ones():
    class Frozen(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = {"scale": jnp.full((), 2.0)}
            made = self.variable("tables", "table", lambda: flax.core.freeze(table))
            if self.is_mutable_collection("tables") and not self.is_initializing():
                made.value = flax.core.freeze({"scale": made.value["scale"] + 1})
            return nn.Dense(1)(x) * made.value["scale"]

    _, _, model_state = trained = started(Frozen(), mean_of_output)
    assert model_state == {"tables": {"table": {"scale": 2}}}
    adapted, params, _ = trained
    loss = adapted.loss(params, model_state, X, jax.random.key(0))
    assert loss.model_state == {"tables": {"table": {"scale": 3}}}


def mean_of_output(view, batch, key):
    return jnp.mean(view(batch))


def test_parameters_are_read_after_the_calls_that_create_them():
    def penalty(view, batch, key):
        loss = jnp.mean(view(batch) ** 2)
        assert view.model_state == {}
        return loss + jnp.sum(view.params["kernel"] ** 2)

    adapted, params, _ = started(nn.Dense(2, use_bias=False), penalty)
    loss = adapted.loss(params, {}, X, jax.random.key(0)).value
    kernel = params["kernel"]
    expected = np.mean((X @ kernel) ** 2) + np.sum(kernel**2)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

    def too_early(view, batch, key):
        return jnp.sum(view.params["kernel"] ** 2) + penalty(view, batch, key)

    with pytest.raises(ModelError) as error:
        adapter.adapt(nn.Dense(2), too_early, X)
    assert str(error.value) == (
        "model.params='Dense' is asked for parameters that no call has created; call "
        "the model before its params are read in loss_fn"
    )


def test_variables_are_read_by_collection():
    """Fails if the first view, in which calls create variables, has other collections
    than the views of a step, or either shows the statistics of an earlier call."""
    seen = []

    def loss_fn(view, batch, key):
        loss = jnp.mean(view(batch, method="encode") ** 2)
        variables = view.variables
        seen.append(jax.tree.structure(variables))
        assert variables.keys() == {"params", "batch_stats"}
        weights = variables["params"]["encoder"]["kernel"]
        statistics = {"mean": variables["batch_stats"]["norm"]["mean"].sum()}
        return loss + jnp.sum(weights**2), 1.0, statistics

    adapted, params, model_state = started(Autoencoder(), loss_fn)
    result = adapted.loss(params, model_state, X, jax.random.key(0))
    assert len(set(seen)) == 1
    after = result.model_state["batch_stats"]["norm"]["mean"]
    assert result.metrics["mean"] == after.sum() != 0


def test_trees_of_two_models_are_compared_in_one_loss():
    """Fails if what is read at the first call is no plain dict."""

    def loss_fn(models, batch, key):
        out = models.student(batch) - models.teacher(batch)
        far = jax.tree.map(jnp.subtract, models.student.params, models.teacher.params)
        return jnp.mean(out**2) + jnp.sum(far["kernel"] ** 2)

    dense = nn.Dense(2)
    adapted, params, model_state = started(
        {"student": dense, "teacher": dense}, loss_fn
    )
    assert adapted.loss(params, model_state, X, jax.random.key(0)).value > 0


def test_variables_hold_what_calls_have_sown():
    def loss_fn(view, batch, key):
        loss = jnp.mean(view(batch) ** 2)
        return loss + view.variables["losses"]["size"][0]

    adapted, params, model_state = started(Sower(), loss_fn)
    assert jnp.isfinite(adapted.loss(params, model_state, X, None).value)


def test_variables_that_no_call_has_created_are_refused():
    def too_early(view, batch, key):
        mean = view.variables["batch_stats"]["norm"]["mean"]
        return jnp.mean((view(batch, method="encode") - mean) ** 2)

    with pytest.raises(ModelError) as error:
        adapter.adapt(Autoencoder(), too_early, X)
    assert str(error.value) == (
        "model.variables='Autoencoder' is asked for collections that no call has "
        "created; call the model before its variables are read in loss_fn"
    )


def over_rows(function, x):
    return jax.lax.scan(lambda c, row: (c, function(row[None])[0]), 0.0, x)[1]


@pytest.mark.parametrize(
    "run", [lambda f, x: jax.jit(f)(x), lambda f, x: jax.checkpoint(f)(x), over_rows]
)
def test_calls_inside_of_transformations_create_parameters_outside(run):
    def inside(view, batch, key):
        out = jnp.mean(run(lambda x: view(x, train=False), batch) ** 2)
        return out + jnp.sum(view.params["head"]["kernel"] ** 2)

    def outside(view, batch, key):
        out = jnp.mean(view(batch, train=False) ** 2)
        return out + jnp.sum(view.params["head"]["kernel"] ** 2)

    module = Backbone()
    adapted, params, model_state = started(module, inside)
    expected, same, same_state = started(module, outside)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, same))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model_state, same_state))
    np.testing.assert_allclose(
        adapted.loss(params, model_state, X, None).value,
        expected.loss(params, model_state, X, None).value,
        rtol=1e-6,
    )


def test_arguments_that_the_view_gives_are_refused():
    def loss_fn(view, batch, key):
        return jnp.mean(view(batch, rngs={"dropout": key}, mutable=["batch_stats"]))

    with pytest.raises(ModelError) as error:
        adapter.adapt(nn.Dense(2), loss_fn, X)
    assert str(error.value) == (
        "model(..., rngs)='given' is set by the view; leave it out: streams follow "
        "from the key of the step\n"
        "model(..., mutable)='given' is set by the view; leave it out: collections "
        "are updated in training, and what is sown is in model.sown"
    )


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3, name="body")(x))
        return nn.Dense(1, name="head")(x)


def test_a_bound_module_starts_from_its_variables():
    variables = Backbone().init(jax.random.key(5), X)
    variables["batch_stats"]["BatchNorm_0"]["mean"] = jnp.full((3,), 0.5)
    variables["losses"] = {"of a call": (1.0,)}
    adapted = adapter.adapt(Backbone().bind(variables), mean_of_output, X)
    params, model_state = adapted.given()
    assert model_state.keys() == {"batch_stats"}
    assert params["body"]["kernel"] is variables["params"]["body"]["kernel"]
    assert jnp.all(model_state["batch_stats"]["BatchNorm_0"]["mean"] == 0.5)


@pytest.mark.parametrize("missing", ["head", "batch_stats"])
def test_a_bound_module_that_lacks_variables_creates_the_others(missing):
    given = Backbone().init(jax.random.key(0), X)["params"]
    body = given["body"]
    if missing == "head":
        given = {"body": body}
    module = Backbone().bind({"params": given})
    adapted, params, model_state = started(module, mean_of_output)
    assert adapted.given is None
    assert jnp.array_equal(params["body"]["kernel"], body["kernel"])
    _, fresh, _ = started(Backbone(), mean_of_output)
    head = given.get("head", fresh["head"])
    assert jnp.array_equal(params["head"]["kernel"], head["kernel"])
    assert jnp.all(model_state["batch_stats"]["BatchNorm_0"]["var"] == 1)


def test_a_bound_module_of_another_shape_is_refused():
    variables = Backbone().init(jax.random.key(5), X[:, :2])
    with pytest.raises(ModelError) as error:
        adapter.adapt(Backbone().bind(variables), mean_of_output, X)
    assert str(error.value) == (
        "params/body/kernel=(2, 3) has the shape (4, 3) in the model; give it that"
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x))
        return x, None


def test_a_scanned_module_has_stacked_parameters_and_a_key_per_layer():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return scan()(x, None)[0]

    def loss_fn(view, batch, key):
        return jnp.mean(view(batch) ** 2)

    adapted, params, model_state = started(Deep(), loss_fn)
    (kernel,) = (x for x in jax.tree.leaves(params) if x.ndim == 3)
    assert kernel.shape == (3, 4, 4)
    assert not jnp.array_equal(kernel[0], kernel[1])
    one, two = jax.random.split(jax.random.key(1))
    values = [
        adapted.loss(params, model_state, X, key).value for key in (one, one, two)
    ]
    assert values[0] == values[1] != values[2]
