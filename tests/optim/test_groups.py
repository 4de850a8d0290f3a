"""Groups of parameters: what decays, which rule a parameter has, what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.reference import raw_moments
from tests.support import rules
from tests.support.refusals import config_error, refusal
from zjax.optim import groups
from zjax.optim.build import make_optimizer
from zjax.optim.onebit import AdamSteps, scale_by_onebit_adam
from zjax.optim.zero_one_adam import make_message, next_steps, zero_one_adam
from zjax.schedule.exchange import (
    LOCAL,
    MERGED,
    ONE_BIT,
    VARIANCE,
    WARM_UP,
    make_exchanges,
)
from zjax.settings import schema
from zjax.settings.schema import Optimizer, ParamGroup
from zjax.typing import Model

PARAMS = {
    "blocks": [
        {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    ],
    "head": {"kernel": jnp.ones((3, 5))},
}


def test_first_matching_group_wins():
    own = (
        ParamGroup(pattern="blocks/0"),
        ParamGroup(pattern="bias$"),
        ParamGroup(pattern="^head/", learning_rate_scale=0.0),
    )
    assert groups.label_params(PARAMS, own) == {
        "blocks": [
            {"kernel": "group_0", "bias": "group_0"},
            {"kernel": "default", "bias": "group_1"},
        ],
        "head": {"kernel": "frozen"},
    }


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [ParamGroup(pattern="blocks/7/kernel")],
            "optimizer.groups[0].pattern='blocks/7/kernel' matches none of 5 "
            "parameters; paths look like blocks/1/kernel, blocks/0/kernel, "
            "blocks/1/bias",
        ),
        (
            [ParamGroup(pattern="blocks"), ParamGroup(pattern="blocks/1")],
            "optimizer.groups[1].pattern='blocks/1' matches 2 parameters, all taken "
            "by earlier groups; move this group before them",
        ),
        (
            [ParamGroup(pattern="bias", weight_decay=0.1)],
            "optimizer.groups[0].weight_decay=0.1 decays nothing, as no matrix is in "
            "the group; leave it at -1.0, or set optimizer.decay_vectors",
        ),
        (
            [ParamGroup(pattern=".*", learning_rate_scale=0.0)],
            "optimizer.groups=('.*',) freezes all 5 parameters; leave some to train",
        ),
        (
            [
                ParamGroup(pattern="^bias$", weight_decay=0.1),
                ParamGroup(pattern="bias$", weight_decay=0.1),
            ],
            "optimizer.groups[0].pattern='^bias$' matches none of 5 parameters; paths "
            "look like blocks/1/bias, blocks/0/bias, blocks/1/kernel\n"
            "optimizer.groups[1].weight_decay=0.1 decays nothing, as no matrix is in "
            "the group; leave it at -1.0, or set optimizer.decay_vectors",
        ),
    ],
    ids=["no match", "shadowed", "nothing to decay", "all frozen", "two at once"],
)
def test_groups_without_effect_are_refused(own, message):
    with config_error(message):
        groups.check_groups(Optimizer(groups=tuple(own)), PARAMS, {})


def test_groups_with_effect_pass():
    own = (
        ParamGroup(pattern="blocks/1", weight_decay=0.1, learning_rate_scale=0.5),
        ParamGroup(pattern="head", learning_rate_scale=0.0),
    )
    groups.check_groups(Optimizer(groups=own), PARAMS, {})
    groups.check_groups(Optimizer(), PARAMS, {})
    vectors = (ParamGroup(pattern="bias", weight_decay=0.1),)
    groups.check_groups(Optimizer(groups=vectors, decay_vectors=True), PARAMS, {})


CASES = {
    "kernel": (("embed", "mlp"), True, ((0,), (1,))),
    "norm/scale": (("embed",), False, None),
    "scanned norm/scale": (("layers", "embed"), False, None),
    "scanned norm/gain": (("layers", "embed"), False, None),
    "scanned/kernel": (("layers", "embed", "mlp"), True, ((1,), (2,))),
    "stages of layers/kernel": (
        ("experts", "layers", "embed", "mlp"),
        True,
        ((2,), (3,)),
    ),
    "query/kernel": (("embed", "heads", "head_dim"), True, ((0,), (1, 2))),
    "key/kernel": (("embed", "kv_heads", "head_dim"), True, ((0,), (1, 2))),
    "out/kernel": (("layers", "heads", "head_dim", "embed"), True, ((1, 2), (3,))),
    "query/bias": (("heads", "head_dim"), False, None),
    "expert/kernel": (("experts", "embed", "mlp"), True, ((1,), (2,))),
    "gated expert/kernel": (("experts", "embed", "gates", "mlp"), True, ((1,), (2, 3))),
    "experts/up_bias": (("layers", "experts", "gates", "mlp"), False, None),
    "experts/down_bias": (("experts", "embed"), False, None),
    "router/kernel": (("embed", "experts"), True, ((0,), (1,))),
    "wte/embedding": (("vocab", "embed"), True, None),
    "head/kernel": (("embed", "vocab"), True, None),
    "conv/kernel": ((None, None, None, None), True, None),
    "temperature": ((), False, None),
}


@pytest.mark.parametrize("path", CASES)
def test_role_follows_the_names_of_dims(path):
    dims, decays, sides = CASES[path]
    names = {path: dims}
    assert groups.is_matrix(path, len(dims), names) is decays
    found = groups.muon_dims(path, len(dims), names)
    assert found == sides


@pytest.mark.parametrize(
    ("path", "num_dims", "decays", "muon"),
    [
        ("kernel", 2, True, True),
        ("anything", 2, True, True),
        ("wte/embedding", 2, True, False),
        ("conv/kernel", 4, True, False),
        ("attention/bias", 2, False, False),
        ("gain", 1, False, False),
    ],
)
def test_role_follows_the_shape_where_names_are_unknown(path, num_dims, decays, muon):
    assert groups.is_matrix(path, num_dims, {}) is decays
    assert (groups.muon_dims(path, num_dims, {}) is not None) is muon


def test_names_skip_what_is_unknown_and_follow_the_settings_of_the_mesh():
    model = Model(
        init=lambda key: ({"a": [jnp.ones((2, 3)), jnp.ones(2)], "b": jnp.ones(2)}, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: {"a": [("kv", "what"), None], "b": None},
    )
    rules = (schema.DimRule(pattern="b", dims=("layers",)),)
    table = schema.NameTable({"kv": "head_dim"}.items())
    _, names = groups.named_params(model, schema.Mesh(names=table, rules=rules))
    assert names == {"a/0": ("head_dim", None), "b": ("layers",)}


STEPS = AdamSteps(0.9, 0.99, 1e-8)
RARE, LARGE = jnp.array([1e-6, 1.0]), jnp.array([1.0, 1.0])
"""Gradients when second moments are kept, and later."""


def test_replicas_of_1_bit_adam_send_bounded_steps():
    """Fails if a token that was rare in the warm-up moves by a million rates."""
    tx = scale_by_onebit_adam(STEPS)
    _, state = tx.update(RARE, tx.init(RARE), phase=WARM_UP)
    sent = next_steps(LARGE, state, STEPS)
    assert sent[0] == pytest.approx(STEPS.bound)
    assert STEPS.bound == pytest.approx(1.0)


@pytest.mark.parametrize("phase", [ONE_BIT, LOCAL])
def test_steps_of_0_1_adam_are_bounded(phase):
    tx = zero_one_adam(lambda step: 0.5, STEPS, lambda params: 0.0)
    _, state = tx.update(RARE, tx.init(RARE), RARE, phase=VARIANCE)
    updates, _ = tx.update(LARGE, state, RARE, phase=phase)
    assert updates[0] == pytest.approx(-0.5 * STEPS.bound)


def test_steps_by_moments_of_all_gradients_are_those_of_adam():
    """Fails if the bound cuts steps that Adam takes while gradients grow."""
    steps = AdamSteps(0.9, 0.95, 1e-8)
    tx = zero_one_adam(lambda step: 1.0, steps, lambda params: 0.0)
    state = tx.init(RARE)
    for number in range(150):
        grads = LARGE * (steps.b2 / steps.b1) ** number
        updates, state = tx.update(grads, state, RARE, phase=VARIANCE)
    assert updates[0] < -1.15 < -steps.bound


FREEZE, NUM_STEPS = 4, 9
RAW = {
    "schedule": "constant",
    "num_warmup_steps": 0,
    "b2": 0.999,
    "bias_correction": False,
    "peak_learning_rate": 0.01,
    "weight_decay": 0.1,
}


def raw_steps(name, grads, params):
    """Returns the parameters after each step of one replica, whose messages arrive."""
    steps = {"freeze_step": FREEZE, "local_step_scaler": 99}
    optimizer = rules.optimizer(name, **RAW, **steps)
    config = schema.Config(num_steps=NUM_STEPS, optimizer=optimizer)
    tx, exchanges = make_optimizer(config), make_exchanges(config)
    takes_phase = isinstance(optimizer.rule, schema.Compressed)
    state, found = tx.init(params), []
    for number, grad in enumerate(grads, start=1):
        phase = exchanges.at(number).phase.name
        kind = {"phase": LOCAL if phase == MERGED else phase} if takes_phase else {}
        message = make_message(optimizer.rule, exchanges.at(number).phase)
        sent = message({"w": grad}, state) if message else {"w": grad}
        updates, state = tx.update(sent, state, params, **kind)
        if phase == MERGED:
            moved = {"w": -updates["w"]}
            updates, state = tx.update(moved, state, params, phase=MERGED)
        params = optax.apply_updates(params, updates)
        found.append(params["w"])
    return np.stack(found)


@pytest.mark.parametrize(
    "name", ["adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam"]
)
def test_without_bias_correction_moments_stay_raw_through_the_freeze(name):
    """Fails if a step after the freeze is 1 / sqrt(1 - b2**4) = 15.8 times smaller."""
    rng = np.random.default_rng(1)
    params = rng.normal(size=(2, 3)).astype(np.float32)
    grads = rng.uniform(0.5, 1.0, (NUM_STEPS, 2, 3)).astype(np.float32)
    freezes = name not in ("adamw", "lamb")
    expected = raw_moments.updates(
        np.float64(grads), np.float64(params), rate=0.01, decay=0.1,
        freeze_step=FREEZE if freezes else NUM_STEPS, trust="lamb" in name,
    )  # fmt: skip
    found = raw_steps(name, jnp.asarray(grads), {"w": jnp.asarray(params)})
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_the_bound_of_raw_steps_clips_what_that_of_corrected_ones_clips():
    raw = dataclasses.replace(STEPS, corrects_bias=False)
    momentum, second = jnp.array([0.9, 1.1, -9.0]), 0.01 * jnp.ones(3)
    corrected = STEPS.of_momentum(momentum, second, 10**6, 1)
    assert corrected == pytest.approx([0.9, 1.0, -1.0])
    found = raw.of_momentum(momentum, second, 10**6, 1)
    assert found == pytest.approx([9.0, 10.0, -10.0])


def test_raw_moments_are_refused_beside_rules_without_the_correction():
    given = ["optimizer.rule=lion", "optimizer.rule.bias_correction=False"]
    start = "optimizer.rule.bias_correction=False has no effect with "
    assert refusal(given, 1).startswith(start)
