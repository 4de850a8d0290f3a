"""What a plan says of arrays that the tensor axis does not split."""

import dataclasses

from tests.support import tensor
from zjax.config import load_config
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import describe_unsharded, render_table
from zjax.sharding.plan import make_plan


def make_tensor_plan(size, *overrides):
    config = tensor.make_config(tensor.GPT, schema.Mesh(tensor=size))
    config = load_config(config, *overrides)
    model = make_model(config)
    mesh = meshes.abstract_mesh(config.mesh, 8)
    return make_plan(config, mesh, model, make_optimizer(config, model))


def test_a_table_is_as_wide_as_the_terminal_and_cuts_nothing(monkeypatch):
    """Fails if names of arrays are cut, whether or not the terminal has room."""
    name = "blocks/attention/" + "#" * 120
    monkeypatch.setenv("COLUMNS", "220")
    assert name in render_table(("array", "bytes"), [(name, "4 B")])
    monkeypatch.setenv("COLUMNS", "80")
    table = render_table(("array", "bytes"), [(name, "4 B")])
    assert max(map(len, table.splitlines())) == 100
    assert table.count("#") == 120


def test_whole_parameters_are_listed_with_what_would_split_them():
    lines = describe_unsharded(make_tensor_plan(4)).splitlines()
    assert lines[0] == "whole over tensor=4: 5.89 kB per device of 38.98 kB in use"
    assert " ".join(lines[3].split()) == (
        "embedding/positions 32x32 4.10 kB [{'pattern': 'embedding/positions', 'dims':"
    )
    assert lines[4].strip() == "('tensor',)}]"
    assert " ".join(lines[5].split()) == "8 vectors 1.79 kB not worth it"


def test_what_it_says_splits_them():
    """Fails if the setting that is printed is not one, or changes nothing."""
    plan = make_tensor_plan(
        4, "mesh.rules=[{'pattern': 'embedding/positions', 'dims': ('tensor',)}]"
    )
    assert "positions" not in describe_unsharded(plan)


def test_nothing_is_said_without_a_tensor_axis():
    plan = make_tensor_plan(1)
    assert describe_unsharded(plan) == ""
    assert describe_unsharded(dataclasses.replace(plan, compute={})) == ""
