"""Which layers have experts, and the biases of their routers."""

import dataclasses

import jax
import pytest

from tests.support.language import GPT
from zjax import config as zconfig
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.settings.mixture import (
    bias_paths,
    experts_by_layer,
    num_blocks,
    segment_shapes,
)
from zjax.sharding.roles import moved_params


def model_of(num_layers, **moe):
    return schema.Model(num_layers=num_layers, moe=schema.TokenChoice(**moe))


def shapes_of(model):
    return tuple(
        (tuple(layer.num_experts for layer in shape.layers), shape.num_blocks)
        for shape in segment_shapes(model)
    )


def test_layers_that_have_experts_and_the_segments_of_them():
    model = model_of(6, num_experts=8, every=2)
    assert experts_by_layer(model) == (0, 8, 0, 8, 0, 8)
    assert shapes_of(model) == (((0, 8), 3),)
    assert num_blocks(model) == 3
    model = model_of(8, num_experts=8, every=3, first_dense=1)
    assert experts_by_layer(model) == (0, 0, 0, 8, 0, 0, 8, 0)
    assert shapes_of(model) == (((0,), 1), ((0, 0, 8), 2), ((0,), 1))
    model = model_of(6, num_experts=(4, 4, 8), every=2)
    assert shapes_of(model) == (((0, 4), 2), ((0, 8), 1))


def test_width_of_an_expert_follows_the_model():
    config = zconfig.load_config(
        {}, "model.moe.num_experts=4", "model.mlp_size=100", "model.mlp_size=200"
    )
    assert config.model.moe.expert_size == 200


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"num_experts": 0, "choice": "tokens", "top_k": 1}, None),
        ({"num_experts": 4, "choice": "tokens"}, schema.TokenChoice(num_experts=4)),
        (
            {"num_experts": 4, "choice": "experts", "top_k": 1, "drop": "none"},
            schema.ExpertChoice(num_experts=4),
        ),
    ],
)
def test_a_record_that_lists_all_settings_names_the_side_that_chooses(record, expected):
    found = zconfig.load_config({"model": {"moe": record, "mlp_size": 8}})
    shape = schema.Model(moe=expected, mlp_size=8)
    assert found.model.moe == shape.moe


def test_a_setting_inside_turns_on_the_choice_of_tokens():
    config = zconfig.load_config({}, "model.moe.top_k=2")
    assert isinstance(config.model.moe, schema.TokenChoice)
    config = zconfig.load_config({}, "model.moe.choice=experts")
    assert isinstance(config.model.moe, schema.ExpertChoice)


@pytest.mark.parametrize("num_experts", [4, (4, 8)])
@pytest.mark.parametrize("every", [1, 2])
def test_paths_are_those_of_the_model(num_experts, every):
    """Fails if a bias is looked for where the model has none."""
    moe = schema.TokenChoice(num_experts=num_experts, every=every, bias_rate=0.01)
    model = dataclasses.replace(GPT, num_layers=2 * every, moe=moe)
    built = make_model(schema.Config(model=model))
    params, _ = jax.eval_shape(built.init, jax.random.key(0))
    assert bias_paths(model) == [*moved_params(built.stack, params)]
