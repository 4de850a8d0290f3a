"""Adapters take the steps of plain single-device code, on every mesh and stage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.config.load import load_config
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run

RANK, ALPHA, RATE, STEPS = 2, 8.0, 1.0, 4
SHAPE = {
    "num_layers": 2,
    "embed_size": 16,
    "mlp_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 32,
    "max_length": 8,
    "positions": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "use_bias": False,
    "attention": "xla",
}


def make_config(form="lora", **settings):
    return load_config(
        {
            "model": SHAPE,
            "data": {"length": 8},
            "global_batch_size": 16,
            "lora": {"rank": RANK, "alpha": ALPHA, "form": form},
            "optimizer": {
                "rule": {"kind": "sgd", "b1": 0.0},
                "schedule": {"kind": "constant", "num_warmup_steps": 0},
                "peak_learning_rate": RATE,
                "weight_decay": 0.0,
                "clip_norm": float("inf"),
            },
            "precision": {"compute_dtype": "float32"},
        }
        | settings
    )


def make_batch():
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def is_adapter(keys):
    return any(getattr(key, "key", None) == "lora" for key in keys)


def oracle(params, form, loss):
    """Steps of SGD on adapters, whose products are those of merged matrices."""
    scale = ALPHA / RANK

    def merge(tree):
        if not isinstance(tree, dict):
            return tree
        if "lora" not in tree:
            return {name: merge(x) for name, x in tree.items()}
        kernel, own = tree["kernel"], tree["lora"]
        stacked = own["b"].ndim + own["a"].ndim - 2 > kernel.ndim
        multiply = functools.partial(jnp.tensordot, axes=1)
        multiply = jax.vmap(multiply) if stacked else multiply
        total = kernel + scale * multiply(own["a"], own["b"])
        if form == "dora":
            dims = tuple(range(int(stacked), own["a"].ndim - 1))
            squares = jnp.sum(total**2, axis=dims, keepdims=True)
            length = jax.lax.stop_gradient(jnp.sqrt(squares))
            total *= own["magnitude"].reshape(length.shape) / length
        return {"kernel": total} | {n: x for n, x in tree.items() if n == "bias"}

    losses = []
    differentiate = jax.jit(jax.value_and_grad(lambda params: loss(merge(params))))
    for _ in range(STEPS):
        value, grads = differentiate(params)
        params = jax.tree_util.tree_map_with_path(
            lambda keys, x, g: x - RATE * g if is_adapter(keys) else x, params, grads
        )
        losses.append(float(value))
    return losses, merge(params)


def first_params(config):
    return jax.jit(make_model(config).init)(jax.random.key(0))[0]


@pytest.fixture(scope="module")
def expected(request):
    form, batch = request.param, jax.tree.map(jnp.asarray, make_batch())
    params = first_params(make_config(form))
    plain = make_model(make_config(form, lora={}))
    losses, _ = oracle(
        params,
        form,
        lambda merged: plain.loss(merged, {}, batch, None).value,
    )
    whole = first_params(make_config(form, lora={}))
    first = jax.jit(lambda whole: plain.loss(whole, {}, batch, None).value)(whole)
    np.testing.assert_allclose(losses[0], first, rtol=1e-6)
    return form, losses


def run_of(config):
    model = make_model(config)
    return make_run(config, model, make_optimizer(config, model))


def losses_of(run, batch):
    state, losses = run.state, []
    for _ in range(STEPS):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("expected", ["lora", "dora"], indirect=True)
def test_built_in_decoder_takes_the_steps_of_merged_matrices(expected):
    """Fails if an adapter has no effect, another factor, or a gradient of lengths."""
    form, losses = expected
    run = run_of(make_config(form, zero={"stage": 0}))
    np.testing.assert_allclose(losses_of(run, make_batch()), losses, rtol=1e-5)
    assert losses[0] - losses[-1] > 0.01
