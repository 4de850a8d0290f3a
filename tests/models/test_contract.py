"""Models and losses that break the contract, and the inputs that are cast."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import zjax
from zjax.errors import DataError, ModelError
from zjax.models import adapter
from zjax.settings import schema
from zjax.sharding.mesh import make_mesh

X = np.ones((2, 4), np.float32)
KINDS = (
    "a Linen module, an NNX module, a function `rngs -> nnx.Module`, a pair "
    "(init, apply) or (params, apply), or a dict of these"
)


def mean_square(view, batch, key):
    return jnp.mean(view(batch) ** 2)


class Dense(nnx.Module):
    def __init__(self, width, *, rngs):
        self.kernel = nnx.Param(jnp.ones((width, width)))

    def __call__(self, x):
        return x @ self.kernel


def make_dict(rngs):
    return {}


def init_nothing(key):
    return {}


def init_integers(key):
    return {"table": jnp.ones((2, 3), jnp.int32), "name": "w", "scale": jnp.ones(())}


class Empty(nn.Module):
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(3, f"model='int' is not a model; use {KINDS}", id="a-number"),
        pytest.param({}, f"model='dict' is not a model; use {KINDS}", id="empty-dict"),
        pytest.param(
            {"a": nn.Dense(1), "b": None},
            f"model.b='NoneType' is not a model; use {KINDS}",
            id="one-of-several",
        ),
        pytest.param(
            nn.Dense,
            "model='Dense' is a Linen class, not a module; pass Dense(...)",
            id="linen-class",
        ),
        pytest.param(
            Dense,
            "model='Dense' cannot be called with rngs alone (missing a required "
            "argument: 'width'); give the other arguments with functools.partial",
            id="nnx-class-with-arguments",
        ),
        pytest.param(
            lambda: Dense(4, rngs=nnx.Rngs(0)),
            "model='<lambda>' cannot be called with rngs alone (too many positional "
            "arguments); give the other arguments with functools.partial",
            id="factory-without-rngs",
        ),
        pytest.param(
            make_dict,
            "model='make_dict' returns dict, not an nnx.Module; return the module",
            id="factory-of-something-else",
        ),
        pytest.param(
            (init_nothing, lambda params, x: x),
            "model='tuple' has no parameters; give it layers, and use them in loss_fn",
            id="functions-without-parameters",
        ),
        pytest.param(
            Empty(),
            "model='Empty' has no parameters; give it layers, and use them in loss_fn",
            id="linen-without-parameters",
        ),
        pytest.param(
            (init_integers, lambda params, x: x),
            "name='str' is not floating-point; keep it in another collection than the "
            "parameters\n"
            "table='int32[2,3]' is not floating-point; keep it in another collection "
            "than the parameters",
            id="parameters-that-are-no-floats",
        ),
    ],
)
def test_models_that_cannot_be_adapted(model, message):
    with pytest.raises(ModelError) as error:
        adapter.adapt(model, mean_square, X)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("out", "message"),
    [
        pytest.param(
            None,
            "loss_fn(...)='NoneType' is neither a loss nor (loss, weight, metrics); "
            "return one of the two",
            id="nothing",
        ),
        pytest.param(
            (jnp.float32(1), {"a": 1}),
            "loss_fn(...)='(float32[], dict)' is neither a loss nor (loss, weight, "
            "metrics); return one of the two",
            id="a-pair",
        ),
        pytest.param(
            jnp.ones((2, 3)),
            "loss='float32[2,3]' is not a scalar; return its mean",
            id="a-loss-per-example",
        ),
        pytest.param(
            (jnp.ones(2), jnp.ones(2), {"accuracy": jnp.ones((3,), bool), "k": "v"}),
            "loss='float32[2]' is not a scalar; return its mean\n"
            "weight='float32[2]' is not a scalar; return its sum\n"
            "metrics/accuracy='bool[3]' is not a scalar; return its mean\n"
            "metrics/k='str' is not a scalar; return its mean",
            id="everything-wrong-at-once",
        ),
        pytest.param(
            jnp.int32(1),
            "loss='int32[]' is not floating-point; return a loss with a gradient",
            id="an-integer",
        ),
    ],
)
def test_losses_that_return_something_else(out, message):
    factory = functools.partial(Dense, 4)
    model = adapter.adapt(factory, lambda view, batch, key: out, X)
    params, model_state = model.init(jax.random.key(0))
    with pytest.raises(ModelError) as error:
        model.loss(params, model_state, X, jax.random.key(0))
    assert str(error.value) == message


class Restless(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((4, 4)))
        self.grows = nnx.Variable(jnp.zeros((1,)))
        self.turns = nnx.Variable(jnp.zeros((2,), jnp.int32))
        self.leaves = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.grows.set_value(jnp.zeros((2,)))
        self.turns.set_value(jnp.zeros((2,)))
        self.comes = nnx.Variable(jnp.zeros(()))
        del self.leaves
        return x @ self.kernel


def test_model_state_must_keep_its_form():
    model = adapter.adapt(Restless, mean_square, X)
    params, model_state = model.init(jax.random.key(0))
    with pytest.raises(ModelError) as error:
        model.loss(params, model_state, X, jax.random.key(0))
    remedy = "keep the shapes of the model state, and sow what is for one step only"
    assert str(error.value) == (
        f"model_state/grows='float32[2]' was float32[1] before loss_fn; {remedy}\n"
        f"model_state/leaves='float32[]' vanished in loss_fn; {remedy}\n"
        f"model_state/turns='float32[2]' was int32[2] before loss_fn; {remedy}\n"
        f"model_state/comes='float32[]' appeared in loss_fn; {remedy}"
    )


ROWS = 8
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype(np.float32)


BATCH = {
    "image": array(4),
    "mask": np.ones((ROWS, 6), np.float32),
    "time": np.full((ROWS, 1), 1000.5, np.float32),
    "y": np.full((ROWS, 1), 1000.5, np.float32),
    "weight": np.full((ROWS, 1), 1000.5, np.float32),
    "scale": array(),
}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, image, mask, time):
        x = nn.Dense(6)(image / 255) * mask
        waves = jnp.sin(time * jnp.arange(1.0, 7)[None])
        block = nn.remat(nn.Dense)
        return nn.Dense(1)(nn.relu(block(6)(x)) + nn.Dense(6)(waves))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.time = nnx.Linear(6, 6, rngs=rngs)
        self.last = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, image, mask, time):
        x = self.first(image - 1.0) * mask

        def add(x, _):
            return self.last.kernel[...].T * x, None

        x, _ = jax.lax.scan(add, x.astype(jnp.float32), None, length=2)
        return self.last(x + self.time(jnp.sin(time * jnp.arange(1.0, 7)[None])))


def loss_fn(model, batch, key):
    found = model(batch["image"], batch["mask"], batch["time"])
    error = batch["weight"] * (found - batch["y"]) ** 2
    seen = {
        name: jnp.float32(x.dtype == jnp.bfloat16) for name, x in sorted(batch.items())
    }
    return (
        (error.mean(1) * batch["scale"]).mean(),
        1.0,
        {"y": batch["y"].mean()} | {f"{name} is cast": x for name, x in seen.items()},
    )


@pytest.mark.parametrize("model", [Linen(), Nnx], ids=["linen", "nnx"])
def test_what_parameters_are_applied_to_is_cast(model):
    """Fails if a target of 1000.5 becomes 1000, or a model computes in float32."""
    run = zjax.initialize(model, optax.sgd(0.0), loss_fn, BATCH)
    assert run.model.cast == ("image", "mask")
    _, metrics = run.step(run.state, BATCH)
    assert metrics["y"] == 1000.5
    cast = {name for name in BATCH if metrics[f"{name} is cast"]}
    assert cast == {"image", "mask"}


def test_a_target_that_the_model_reads_is_cast_and_the_plan_says_so():
    """Fails if the target of an autoencoder loses its digits and nothing tells it."""

    def loss_fn(model, batch, key):
        target = batch["image"]
        return jnp.mean((model(target) - target) ** 2), 1.0, {"target": target.mean()}

    def metrics_and_plan(**settings):
        run = zjax.initialize(
            nn.Dense(4), optax.sgd(0.0), loss_fn, {"image": image}, **settings
        )
        text = zjax.describe_plan(run.plan)
        assert zjax.describe_plan_totals(run.plan) in text
        return run.evaluate(run.state, {"image": image})["target"], text

    image = np.full((ROWS, 4), 1000.5, np.float32)
    target, text = metrics_and_plan()
    assert target == 1000
    assert text.splitlines()[-1] == "cast in a batch: image to bfloat16"
    target, text = metrics_and_plan(cast=[])
    assert target == 1000.5
    assert "cast" not in text
    target, text = metrics_and_plan(config={"precision": {"compute_dtype": "float32"}})
    assert target == 1000.5
    assert "cast" not in text


def test_inputs_can_be_named():
    run = zjax.initialize(
        Linen(), optax.sgd(0.0), loss_fn, BATCH, cast=["image", "scale"]
    )
    assert run.model.cast == ("image", "scale")
    with pytest.raises(DataError) as error:
        zjax.adapt(Linen(), loss_fn, BATCH, cast=["images", "y"])
    assert str(error.value) == (
        "cast='images' is no floating-point array of the batch; use any of image, "
        "mask, scale, time, weight, y"
    )


def test_targets_of_a_loss_in_parts_are_none():
    """Fails if a loop that computes the loss is taken for the model."""
    batch = {"x": array(4, 3), "y": array(4, 1), "extra": array(2)}

    def init(key):
        return {"w": jnp.ones((3, 5)), "head": jnp.ones((5, 1))}

    def apply(params, batch):
        hidden = batch["x"] @ params["w"]

        def add(total, part):
            hidden, y = part
            return total + ((hidden @ params["head"] - y) ** 2).mean(), None

        parts = hidden.swapaxes(0, 1), batch["y"].swapaxes(0, 1)
        total, _ = jax.lax.scan(add, jnp.float32(0), parts)
        return total + 0.1 * (params["w"] ** 2).sum() + batch["extra"].sum()

    def loss(model, batch, key):
        return model(batch)

    assert zjax.adapt((init, apply), loss, batch).cast == ("x",)


@pytest.mark.parametrize("where", ["error", "target"])
def test_targets_of_a_loss_with_a_learned_deviation_are_none(where):
    """Fails if a parameter that scales or shifts an error makes it an input."""
    batch = {"x": array(3), "y": np.full((ROWS, 2), 1000.5, np.float32)}

    def init(key):
        return {"w": jnp.zeros((3, 2)), "shift": jnp.zeros(2), "log": jnp.zeros(2)}

    def apply(params, x):
        return x @ params["w"], params["shift"][None], params["log"][None]

    def loss(model, batch, key):
        found, shift, log = model(batch["x"])
        if where == "error":
            error = batch["y"] - found
        else:
            error = batch["y"] - shift - found
        return (error / jnp.exp(log) + log).mean()

    run = zjax.initialize((init, apply), optax.sgd(0.0), loss, batch)
    assert run.model.cast == ("x",)
    assert run.evaluate(run.state, batch)["loss"] == 1000.5


def test_a_loss_that_names_axes_of_the_mesh_is_read_before_there_is_one():
    """Fails if only losses that need no mesh can be given to `zjax.adapt`."""

    def loss_fn(model, batch, key):
        x = jax.lax.with_sharding_constraint(batch["image"], P("data"))
        return jnp.mean((model(x) - batch["y"]) ** 2)

    model = (lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
    run = zjax.initialize(model, optax.sgd(0.1), loss_fn, BATCH)
    assert run.model.cast == ("image",)
    _, metrics = run.step(run.state, BATCH)
    assert float(metrics["loss"]) == pytest.approx(1000.5**2, rel=1e-6)


def test_a_loss_that_brings_its_mesh_is_read_in_no_other():
    mesh = make_mesh(schema.Mesh())
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(jnp.mean(x), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )

    def loss_fn(model, batch, key):
        return mean(model(batch["image"]))

    model = (lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
    assert zjax.adapt(model, loss_fn, BATCH).cast == ("image",)
