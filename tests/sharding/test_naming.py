"""Names of dims, rules of the user for them, and what a plan says of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import tensor
from tests.support.refusals import config_error, plan_error
from zjax.config import check_config, load_config
from zjax.errors import PlanError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding import mesh, naming
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import describe_unsharded, render_table
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan
from zjax.typing import Model

PARAMS = {
    "up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)},
    "blocks": {"kernel": jnp.zeros((2, 4, 8))},
}
NAMES = {
    "up": {"kernel": None, "bias": ("mlp",)},
    "blocks": {"kernel": ("layers", "embed", None)},
}
FOREIGN = {
    "up": {"kernel": ("fsdp", ("data", "tp")), "bias": ("tp",)},
    "blocks": {"kernel": ("layers", "embed", "mlp", "kv")},
}


def names_by_path(*rules, given=NAMES, mesh=None, **names):
    model = Model(
        init=lambda key: (PARAMS, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: given,
    )
    settings = schema.Mesh(
        rules=tuple(schema.DimRule(pattern=p, dims=dims) for p, dims in rules),
        names=schema.NameTable(names.items()),
    )
    names = naming.names_of_dims(model, PARAMS, settings, mesh)
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
    keys = [jax.tree_util.keystr(p, simple=True, separator="/") for p in paths]
    return dict(zip(keys, names, strict=True))


def test_without_rules_names_are_those_of_the_model():
    assert names_by_path() == {
        "blocks/kernel": ("layers", "embed", None),
        "up/bias": ("mlp",),
        "up/kernel": (None, None),
    }


def test_first_rule_wins_and_the_dim_of_layers_stays():
    found = names_by_path(("up/kernel", ("", "tensor")), ("kernel$", ("mlp",)))
    assert found["up/kernel"] == (None, "tensor")
    assert found["blocks/kernel"] == ("layers", "mlp", None)
    assert found["up/bias"] == ("mlp",)


def test_impossible_rules_are_refused_together():
    with plan_error(
        "mesh.rules[1].pattern='up/k' matches 1 parameters, all taken by earlier "
        "rules; move this rule before them\n"
        "mesh.rules[2].pattern='gate' matches none of 3 parameters; paths look like "
        "up/bias, up/kernel, blocks/kernel\n"
        "mesh.rules[3].dims=('tensr',) has no rule for tensr; use one of batch, "
        "length, embed, heads, kv_heads, head_dim, mlp, vocab, experts, gates, "
        "capacity, layers, tensor, or ''\n"
        "mesh.rules[0].dims=('', '', 'mlp') names 3 dims, and blocks/kernel has 2; "
        "name each dim once, from the first on\n"
        "mesh.rules[0].dims=('', '', 'mlp') names 3 dims, and up/kernel has 2; "
        "name each dim once, from the first on"
    ):
        names_by_path(
            ("kernel", ("", "", "mlp")),
            ("up/k", ("mlp",)),
            ("gate", ("mlp",)),
            ("bias", ("tensr",)),
        )


def test_names_of_other_meshes_are_told_once_where_nothing_is_split_by_name(caplog):
    mesh = abstract_mesh(schema.Mesh(replica=2, sequence=2), 8)
    for _ in range(2):
        found = names_by_path(given=FOREIGN, mesh=mesh)
    assert found == {
        "blocks/kernel": ("layers", "embed", "mlp"),
        "up/bias": (None,),
        "up/kernel": (None, None),
    }
    assert caplog.messages == [
        "names of dims that split nothing on this mesh: blocks/kernel, tp, fsdp, data"
    ]


def test_a_table_translates_names_of_other_meshes():
    mesh = abstract_mesh(schema.Mesh(tensor=2), 8)
    given = FOREIGN | {"blocks": {"kernel": ("layers", "kv", "embed")}}
    table = {"tp": "tensor", "fsdp": "", "data": "", "kv": "head_dim", "embed": "mlp"}
    assert names_by_path(given=given, mesh=mesh, **table) == {
        "blocks/kernel": ("layers", "head_dim", "mlp"),
        "up/bias": ("tensor",),
        "up/kernel": (None, "tensor"),
    }


def test_names_that_no_rule_can_place_are_refused_where_names_split(caplog):
    mesh = abstract_mesh(schema.Mesh(tensor=2), 8)
    with pytest.raises(PlanError) as error:
        names_by_path(given=FOREIGN, mesh=mesh, fsdp="embed", data="heads", layers="")
    known = "one of batch, length, embed, heads, kv_heads, head_dim, mlp, vocab, "
    known += (
        "experts, gates, capacity, layers, tensor, or '' for a dim that is not split"
    )
    table = "{'fsdp': 'embed', 'data': 'heads', 'layers': ''}"
    assert str(error.value) == (
        "blocks/kernel=('layers', 'embed', 'mlp', 'kv') has more names than the 3 "
        "dims; use one name per dim, or mesh.rules\n"
        f"mesh.names={table} does not say what tp is, in up/bias=('tp',); give it a "
        f"name of zjax, as in {{'tp': 'tensor'}}: {known}"
    )
    with plan_error(
        "up/kernel=('fsdp', ('data', 'tp')) names one dim mlp and tensor; leave one of "
        "them, with '' for the other in mesh.names"
    ):
        names_by_path(
            ("blocks", ()), given=FOREIGN, mesh=mesh, fsdp="", data="mlp", tp="tensor"
        )
    # A rule wins over what the model says, so that nothing is left to refuse.
    found = names_by_path(("", ("tensor",)), given=FOREIGN, mesh=mesh)
    assert found["up/kernel"] == ("tensor", None)
    assert not caplog.messages


def test_entries_of_the_table_that_change_nothing_are_refused():
    with plan_error(
        "mesh.names['mlp']='mpl' has no rule for mpl; use one of batch, length, "
        "embed, heads, kv_heads, head_dim, mlp, vocab, experts, gates, capacity, "
        "layers, tensor, or ''\n"
        "mesh.names['tp']='tensor' translates no name of the model; remove it; the "
        "model names layers, embed, mlp"
    ):
        names_by_path(mlp="mpl", tp="tensor")


def test_patterns_are_checked_before_there_is_a_model():
    rules = "mesh.rules=[{'pattern': '('}, {'pattern': 'x'}, {'pattern': 'x'}]"
    with config_error(
        "mesh.rules[0].pattern='(' is not a regular expression: missing ), "
        "unterminated subpattern at position 0; correct it, or escape characters "
        "with \\\n"
        "mesh.rules[2].pattern='x' never matches after mesh.rules[1]; remove one"
    ):
        check_config(load_config({}, rules), 8)


MESH = mesh.abstract_mesh(schema.Mesh(tensor=2), 8)


@pytest.mark.parametrize(
    ("logical", "expected"),
    [
        (("embed", "heads", "head_dim"), P(None, "tensor", None)),
        (("layers", "mlp", "embed"), P(None, "tensor", None)),
        (("batch", "length", None), P("data", None, None)),
        ((), P()),
    ],
)
def test_spec_for(logical, expected):
    assert mesh.spec_for(logical, "x", MESH) == expected


@pytest.mark.parametrize(
    ("logical", "message"),
    [
        (
            ("heads", "mlp"),
            "w=('heads', 'mlp') claims the tensor axis twice; name one of the two dims "
            "None",
        )
    ],
)
def test_impossible_names_are_refused(logical, message):
    with plan_error(message):
        mesh.spec_for(logical, "w", MESH)


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
