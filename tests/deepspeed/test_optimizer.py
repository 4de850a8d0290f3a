"""Optimizers of a ds_config take the steps that torch and DeepSpeed take."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.reference import optimizers as reference
from zjax.config import load_config
from zjax.deepspeed import check_optimizer_is_given, convert
from zjax.errors import ConfigError
from zjax.optim import transforms
from zjax.optim.build import make_optimizer

MUON = {
    "optimizer.rule": "muon",
    "optimizer.schedule": "constant",
    "optimizer.schedule.num_warmup_steps": 0,
    "optimizer.peak_learning_rate": 0.01,
    "optimizer.rule.b1": 0.95,
}

MODEL = (lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
BATCH = {"x": np.ones((8, 4), np.float32)}


def converted(kind, **params):
    optimizer = {"type": kind, "params": params}
    return convert({"train_batch_size": 8, "optimizer": optimizer})


def test_sgd_decays_through_its_momentum_as_torch_does():
    """Zero gradients: a decoupled decay would leave twice as much after 20 steps."""
    found = converted("SGD", lr=0.1, momentum=0.9, weight_decay=0.05)
    assert not found.problems()
    tx = make_optimizer(load_config({}, found.settings))
    start = np.random.default_rng(0).normal(size=(4, 4))
    params = {"kernel": jnp.asarray(start, jnp.float32)}
    state = tx.init(params)
    for _ in range(20):
        updates, state = tx.update({"kernel": jnp.zeros((4, 4))}, state, params)
        params = optax.apply_updates(params, updates)
    zeros, rates = np.zeros((20, 4, 4)), [0.1] * 20
    rule = {"momentum": 0.9, "decay": 0.05}
    want = reference.sgd(start, zeros, rates, **rule, decoupled=False)
    np.testing.assert_allclose(params["kernel"], want, rtol=1e-5)
    apart = reference.sgd(start, zeros, rates, **rule)
    assert np.all(np.abs(want) < 0.6 * np.abs(apart))


def test_muon_is_refused_by_the_factor_that_its_steps_have_here():
    """DeepSpeed scales an orthogonal matrix by sqrt(max(1, outputs / inputs))."""
    (problem,) = converted("Muon", lr=0.02).problems()
    assert str(problem) == (
        "optimizer.type='Muon' has steps of another size: optimizer.rule=muon takes "
        "steps that are 0.2 * sqrt(inputs of the matrix) times as large; leave the "
        "section out and set optimizer.rule=muon with a rate of its own, or give "
        "optax.contrib.muon to zjax.initialize, whose steps have the size of "
        "DeepSpeed's but are computed in float32, not in half precision"
    )
    ours = make_optimizer(load_config({}, MUON))
    theirs = optax.contrib.muon(0.01)
    for inputs, outputs in ((16, 64), (64, 16)):
        params = {"kernel": jnp.zeros((inputs, outputs))}
        grads = {"kernel": jnp.ones((inputs, outputs))}
        got, want = (
            tx.update(grads, tx.init(params), params)[0]["kernel"]
            for tx in (ours, theirs)
        )
        np.testing.assert_allclose(got, 0.2 * inputs**0.5 * want, rtol=1e-4)


def test_limits_of_lamb_are_those_that_it_has():
    limits = {"max_coeff": transforms.MAX_RATIO, "min_coeff": transforms.MIN_RATIO}
    assert not converted("Lamb", lr=1e-3, **limits).problems()


@pytest.fixture
def write(tmp_path):
    def make(values):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_batch_size": 8} | values))
        return path

    return make


@pytest.mark.parametrize("makes", ["run", "trainer"])
def test_sections_that_a_given_optimizer_replaces_are_named(write, makes):
    path = write(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR"},
        }
    )
    with pytest.raises(ConfigError) as error:
        if makes == "run":
            zjax.initialize(MODEL, optax.sgd(0.1), lambda m, b, k: 0.0, BATCH, path)
        else:
            zjax.Trainer(str(path), tx=optax.sgd(0.1))
    rest = "has no effect on the optimizer that was given; "
    rest += "leave the section out, or give None as the optimizer"
    assert str(error.value) == f"optimizer='2 keys' {rest}\nscheduler='1 keys' {rest}"


def test_other_sections_stay_beside_a_given_optimizer(write):
    check_optimizer_is_given(write({"fp16": {"enabled": True}}))
    check_optimizer_is_given({"optimizer": {"name": "adamw"}})
