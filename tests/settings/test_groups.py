"""Which frozen parameters lose their master weights."""

import pytest

from zjax.settings import schema
from zjax.settings.parameters import frozen_as_masters


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"mesh": schema.Mesh(pipeline=2, tensor=2)}, ""),
        ({"zero": schema.Zero(memory="pinned_host")}, ""),
        ({"zero": schema.Zero(memory="auto")}, "zero.optimizer_memory='auto'"),
        (
            {"zero": schema.Zero(memory="pinned_host", gradient_memory="nvme")},
            "zero.gradient_memory='nvme'",
        ),
        (
            {"communication": schema.Communication(num_local_steps=2)},
            "communication.num_local_steps=2",
        ),
        (
            {"optimizer": schema.Optimizer(rule=schema.OnebitAdam())},
            "optimizer.rule='onebit_adam'",
        ),
    ],
)
def test_settings_whose_programs_handle_all_parameters_alike(settings, expected):
    """Fails if a program without a frozen form gets one."""
    assert frozen_as_masters(schema.Config(**settings)) == expected
