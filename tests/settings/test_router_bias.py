"""What moves the biases of routers, and settings that freeze them."""

import dataclasses

import jax
import pytest

from tests.support.language import GPT
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.errors import ConfigError
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.settings.mixture import bias_paths
from zjax.sharding.roles import moved_params

MOE = {"num_experts": 4, "top_k": 2, "bias_rate": 0.01}
PYRAMID = {"num_layers": 3, "moe": MOE | {"num_experts": [4, 4, 8]}}
BOTH = "blocks/segment0/mlp/router/bias and blocks/segment1/mlp/router/bias"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"model": {"moe": MOE}, "lora": {"rank": 4}},
            "model.moe.bias_rate=0.01 moves blocks/mlp/router/bias, which lora.rank=4 "
            "freezes; set it to 0.0, or name the bias in lora.also_train",
        ),
        (
            {"model": PYRAMID, "lora": {"rank": 4}},
            f"model.moe.bias_rate=0.01 moves {BOTH}, which lora.rank=4 freezes; set it "
            "to 0.0, or name the bias in lora.also_train",
        ),
        (
            {"model": PYRAMID}
            | {"lora": {"rank": 4, "also_train": ["segment1/mlp/router/bias$"]}},
            "model.moe.bias_rate=0.01 moves blocks/segment0/mlp/router/bias, which "
            "lora.rank=4 freezes; set it to 0.0, or name the bias in lora.also_train",
        ),
        (
            {"model": {"moe": MOE}}
            | {
                "optimizer.groups": [
                    {"pattern": "norm", "learning_rate_scale": 0.5},
                    {"pattern": "router", "learning_rate_scale": 0.0},
                ]
            },
            "model.moe.bias_rate=0.01 moves blocks/mlp/router/bias, which "
            "optimizer.groups freezes; set it to 0.0, or leave the bias out of groups "
            "with learning_rate_scale=0.0",
        ),
    ],
    ids=["adapters", "segments", "one-segment", "groups"],
)
def test_a_bias_that_would_not_move_is_refused(settings, expected):
    """Fails if a run evens no load and says nothing."""
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(settings), num_devices=1)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"model": PYRAMID, "lora": {"rank": 4, "also_train": ["router/bias"]}},
        {"model": PYRAMID}
        | {"lora": {"rank": 4, "also_train": [f"^{x}$" for x in BOTH.split(" and ")]}},
        {"model": {"moe": MOE}}
        | {
            "optimizer.groups": [
                {"pattern": "router/bias"},
                {"pattern": "mlp", "learning_rate_scale": 0.0},
            ]
        },
        {"model": {"moe": MOE | {"bias_rate": 0.0, "choice_bias": True}}}
        | {"lora": {"rank": 4}},
    ],
    ids=["one-pattern", "a-pattern-each", "an-earlier-group", "does-not-move"],
)
def test_others_run(settings):
    check_config(load_config(settings), num_devices=1)


@pytest.mark.parametrize("num_experts", [4, (4, 8)])
@pytest.mark.parametrize("every", [1, 2])
def test_paths_are_those_of_the_model(num_experts, every):
    """Fails if a bias is looked for where the model has none."""
    moe = schema.TokenChoice(num_experts=num_experts, every=every, bias_rate=0.01)
    model = dataclasses.replace(GPT, num_layers=2 * every, moe=moe)
    built = make_model(schema.Config(model=model))
    params, _ = jax.eval_shape(built.init, jax.random.key(0))
    assert bias_paths(model) == [*moved_params(built.stack, params)]
