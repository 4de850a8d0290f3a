"""What is particular to NNX: shared variables, lists, random state, loaded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zjax.errors import ModelError
from zjax.models import adapter

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 12


def mean_square(view, batch, key):
    return jnp.mean(view(batch) ** 2)


def started(model, loss_fn=mean_square, batch=X):
    adapted = adapter.adapt(model, loss_fn, batch)
    return adapted, *jax.jit(adapted.init)(jax.random.key(0))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.Param(jnp.full((1, 4), float(i))) for i in range(11)]
        )
        self.head = self.embed
        self.table = jnp.ones((1, 4))
        self.adapters = nnx.Dict(a=nnx.LoRA(4, 2, 4, rngs=rngs))

    def __call__(self, tokens):
        x = self.embed(tokens) + self.table
        for block in self.blocks:
            x = x + block
        return self.head.attend(x + self.adapters.a(x))


def tied_loss(view, batch, key):
    return jnp.mean(view(batch) ** 2)


def test_shared_variables_appear_once_and_lists_by_number():
    tokens = np.array([0, 1, 2])
    adapted, params, model_state = started(Tied, tied_loss, tokens)
    assert params["embed"]["embedding"].shape == (5, 4)
    assert "head" not in params
    assert set(params["blocks"]) == {str(i) for i in range(11)}
    assert params["adapters"]["a"].keys() == {"lora_a", "lora_b"}
    assert model_state.keys() == {"table"}
    view = adapted.bind(params, model_state)
    assert isinstance(view, Tied)
    assert view.head is view.embed
    assert [block[0, 0] for block in view.blocks] == list(range(11))


def test_a_gradient_of_a_shared_variable_is_the_sum_over_its_uses():
    tokens = np.array([0, 1, 2])
    adapted, params, model_state = started(Tied, tied_loss, tokens)
    module = adapted.bind(params, model_state)
    expected = nnx.grad(lambda m: tied_loss(m, tokens, None))(module)
    grads = jax.grad(lambda p: adapted.loss(p, model_state, tokens, None).value)(params)
    np.testing.assert_allclose(
        grads["embed"]["embedding"], expected.embed.embedding[...], rtol=1e-5, atol=1e-6
    )


class Counter(nnx.Variable):
    pass


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.calls = Counter(jnp.array(0))
        self.total = jnp.zeros((1,))

    def __call__(self, x):
        self.calls[...] += 1
        self.total = self.total + jnp.sum(x)
        x = self.dense(x)
        self.sow(nnx.Intermediate, "size", jnp.sum(x**2))
        return x


def counting_loss(view, batch, key):
    out, sown = nnx.capture(view, nnx.Intermediate)(batch)
    return jnp.mean(out), 1.0, {"size": sown["size"][0]}


@pytest.mark.parametrize(
    "make", [Counting, Counting(nnx.Rngs(0))], ids=["new", "loaded"]
)
def test_custom_variables_and_bare_arrays_are_model_state_and_sown_values_are_not(make):
    adapted, params, model_state = started(make, counting_loss)
    assert model_state == {"calls": 0, "total": 0}
    loss = jax.jit(adapted.loss)(params, model_state, X, jax.random.key(1))
    assert loss.model_state["calls"] == 1
    np.testing.assert_allclose(loss.model_state["total"], [X.sum()], rtol=1e-6)
    out = X @ params["dense"]["kernel"] + params["dense"]["bias"][None]
    np.testing.assert_allclose(loss.metrics["size"], (out**2).sum(), rtol=1e-4)


class Layered(nnx.Module):
    """Two dropouts of one mask length, the second with a key for each of 3 layers."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((1,)))
        self.one = nnx.Dropout(0.5, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.many = make(rngs.split(3))

    def __call__(self, x):
        drop = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))
        return self.one(x * self.scale), drop(self.many, x * self.scale)


def test_each_stream_and_each_split_of_it_draws_on_its_own():
    def loss_fn(view, batch, key):
        one, many = view(jnp.ones((64,)))
        rows = [one, *many]
        equal = [jnp.all(a == b) for i, a in enumerate(rows) for b in rows[:i]]
        return jnp.mean(one), 1.0, {"equal": sum(x.astype(int) for x in equal)}

    adapted, params, model_state = started(Layered, loss_fn)
    assert model_state == {}
    loss = jax.jit(adapted.loss)
    train = loss(params, model_state, X, jax.random.key(1))
    assert train.metrics["equal"] == 0
    evaluation = loss(params, model_state, X, None)
    assert evaluation.metrics["equal"] == 6
    view = adapted.bind(params, model_state)
    assert view.many.rngs.key.shape == (3,)


class Named(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("embed", "mlp")
        )
        self.up = nnx.Linear(4, 8, kernel_init=kernel, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((1, 8)), logical=(None, "mlp"))
        self.stack = nnx.Param(jnp.ones((2, 8, 1)), logical=("layers",))

    def __call__(self, x):
        return self.up(x) * self.scale @ self.stack[0]


def test_names_come_from_logical_or_from_flax_partitioning():
    adapted, params, _ = started(Named)
    assert adapted.logical(params) == {
        "up": {"kernel": ("embed", "mlp"), "bias": None},
        "scale": (None, "mlp"),
        "stack": ("layers",),
    }


class Norm(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


def test_weights_of_a_loaded_module_are_given_and_the_module_stays_as_it_is():
    module = Norm(nnx.Rngs(3))
    module.norm.mean[...] = jnp.full((4,), 0.5)
    adapted = adapter.adapt(module, mean_square, X)
    params, model_state = adapted.given()
    assert params["dense"]["kernel"] is module.dense.kernel[...]
    assert jnp.all(model_state["norm"]["mean"] == 0.5)
    np.testing.assert_allclose(
        adapted.loss(params, model_state, X, None).value,
        mean_square(nnx.view(module, use_running_average=True), X, None),
        rtol=1e-6,
    )
    adapted.loss(params, model_state, X, jax.random.key(0))
    assert jnp.all(module.norm.mean[...] == 0.5)


def test_what_a_loaded_module_has_sown_stays_in_it_alone():
    module = Norm(nnx.Rngs(3))
    module.sown = nnx.Intermediate(jnp.ones(()))
    _, model_state = adapter.adapt(module, mean_square, X).given()
    assert model_state.keys() == {"norm"}
    assert hasattr(module, "sown")


def test_an_abstract_module_has_shapes_and_refuses_to_start_without_weights():
    abstract = nnx.eval_shape(lambda: Norm(nnx.Rngs(0)))
    adapted = adapter.adapt(abstract, mean_square, X)
    params, model_state = jax.eval_shape(adapted.init, jax.random.key(0))
    assert params["dense"]["kernel"].shape == (4, 4)
    assert model_state["norm"]["mean"].shape == (4,)
    with pytest.raises(ModelError) as error:
        adapted.given()
    assert str(error.value) == (
        "model='Norm' is abstract and has no weights; pass the function that makes it, "
        "or a module with weights"
    )
    loaded, rest = adapter.adapt(Norm(nnx.Rngs(1)), mean_square, X).given()
    assert jnp.isfinite(adapted.loss(loaded, rest, X, None).value)


class Tree(nnx.Module):
    def __init__(self, rngs):
        self.affine = nnx.Param({"scale": jnp.full((4,), 2.0), "bias": jnp.ones((4,))})

    def __call__(self, x):
        return x * self.affine["scale"][None] + self.affine["bias"][None]


def test_a_parameter_may_be_a_tree_of_arrays():
    adapted, params, model_state = started(Tree)
    assert params["affine"].keys() == {"scale", "bias"}
    grads = jax.grad(lambda p: adapted.loss(p, model_state, X, None).value)(params)
    expected = (2 * (2 * X + 1) / X.size).sum(axis=0)
    np.testing.assert_allclose(grads["affine"]["bias"], expected, rtol=1e-6)
    assert adapted.loss(params, model_state, X, jax.random.key(0)).model_state == {}
