"""Adapters beside other settings, and frozen parameters without master weights."""

import pytest

from tests.support.refusals import config_error
from zjax.config import check_config, load_config
from zjax.errors import PlanError
from zjax.estimate.mesh import find_obstacle, propose_mesh
from zjax.estimate.trial import Machine
from zjax.settings import schema
from zjax.settings.parameters import adapter_problems, setting_that_trains_frozen


def test_dropout_does_not_reach_modules_of_users():
    """Fails if a run of one's own module trains without the dropout it asks for."""
    config = load_config({"lora": {"rank": 4, "dropout": 0.1}})
    with config_error(
        "lora.dropout=0.1 has no effect on the model that was given; leave it out, "
        "or give no model"
    ):
        check_config(config, num_devices=1, user_model=True)


def test_codes_leave_axes_for_zjax_to_choose():
    """Fails if mesh="auto" refuses codes; meshes that codes cannot have are dropped."""
    model = {"num_layers": 2, "embed_size": 64, "num_heads": 2, "vocab_size": 300}
    settings = {"lora": {"rank": 4, "quantize": "int8"}, "model": model, "mesh": "auto"}
    config = load_config(settings)
    assert list(adapter_problems(config, 2)) == []
    mesh = propose_mesh(config, Machine(2, 2, 1e12)).mesh
    assert (mesh.data, mesh.pipeline, mesh.tensor) == (2, 1, 1)
    with pytest.raises(PlanError):
        propose_mesh(config, Machine(2, 2, 1.0))
    for axis in ("tensor", "pipeline"):
        sized = schema.Mesh(**{axis: 2})
        obstacle = find_obstacle(config, sized, Machine(2, 2, 1.0), None)
        assert "lora.quantize='int8'" in obstacle


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"mesh": schema.Mesh(pipeline=2, tensor=2)}, ""),
        ({"zero": schema.Zero(offload=schema.PinnedHost())}, ""),
        ({"zero": schema.Zero(offload=schema.AutoOffload())}, "zero.offload='auto'"),
        (
            {"zero": schema.Zero(offload=schema.PinnedHost(gradient_memory="nvme"))},
            "zero.offload.gradient_memory='nvme'",
        ),
        (
            {
                "communication": schema.Communication(
                    local_steps=schema.LocalSteps(num_steps=2)
                )
            },
            "communication.local_steps.num_steps=2",
        ),
        (
            {"optimizer": schema.Optimizer(rule=schema.OnebitAdam())},
            "optimizer.rule='onebit_adam'",
        ),
    ],
)
def test_settings_whose_programs_handle_all_parameters_alike(settings, expected):
    """Fails if a program without a frozen form gets one."""
    assert setting_that_trains_frozen(schema.Config(**settings)) == expected
