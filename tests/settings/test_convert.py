"""Plain values become a Config, or one error; a Config becomes text again."""

import ast
import json
import math

import ml_collections
import pytest

from tests.support.refusals import config_error, listed
from zjax import config as zconfig
from zjax.config import gin, load
from zjax.errors import ConfigError
from zjax.settings import convert, describe, mappings, schema
from zjax.settings.describe import ABSENT, differences

REFUSALS = listed("mappings.txt")


@pytest.mark.parametrize(("values", "message"), REFUSALS.items(), ids=REFUSALS)
def test_mistake_is_named_with_the_way_out(values, message):
    with config_error(message):
        convert.from_mapping(schema.Config, ast.literal_eval(values))


@pytest.mark.parametrize("given", [2, math.inf])
def test_numbers_become_floats(given):
    built = convert.from_mapping(schema.Optimizer, {"clip_norm": given})
    assert (type(built.clip_norm), built.clip_norm) == (float, given)
    with config_error("optimizer.rule.eps=nan is not a number; use a number"):
        convert.from_mapping(schema.Config, {"optimizer": {"eps": math.nan}})


def test_a_table_of_names_is_a_mapping_on_every_way_in():
    table = {"tp": "tensor", "fsdp": ""}
    changed = mappings.base()
    changed.mesh.names = table
    by_name = "mesh.names.fsdp=''"
    ways = [
        load.load_config({"mesh": {"names": table}}),
        load.load_config(changed),
        load.load_config({}, f"mesh.names={table}"),
        load.load_config({"mesh": {"names": {"tp": "tensor"}}}, by_name),
        load.load_config(load.load_config({}, "mesh.names.tp=tensor"), by_name),
        gin.from_gin(bindings=[f"config.mesh.names = {table}"]),
    ]
    again = gin.from_gin(bindings=describe.describe_config(ways[0]).splitlines())
    assert {hash(config) for config in (*ways, again)} == {hash(ways[0])}
    assert ways[0].mesh.names == (("fsdp", ""), ("tp", "tensor"))
    assert json.loads(json.dumps(mappings.to_mapping(again)))["mesh"]["names"] == table


def test_groups_and_sinks_become_tuples():
    frozen = schema.ParamGroup(pattern="bias")
    built = convert.from_mapping(
        schema.Config,
        {
            "optimizer": {"groups": [{"pattern": "norm"}, frozen]},
            "observe": {"sinks": ["csv"]},
        },
    )
    assert built.optimizer.groups == (schema.ParamGroup(pattern="norm"), frozen)
    assert built.observe.sinks == ("csv",)
    hash(built)


def test_instance_of_a_section_is_checked_inside():
    zero = schema.Zero()
    object.__setattr__(zero, "stage", 7)
    values = {"zero": zero}
    with pytest.raises(ConfigError, match=r"^zero.stage=7 is not a choice"):
        convert.from_mapping(schema.Config, values)


def test_settings_that_a_choice_does_not_read_are_told_from_other_mistakes():
    sgd = {"rule": {"kind": "sgd", "b2": 0.5}}
    found = convert.unread({"seed": "x", "optimizer": sgd})
    assert [problem.field for problem in found] == ["optimizer.rule.b2"]


def test_base_is_the_defaults_as_a_config_dict():
    base = mappings.base()
    assert isinstance(base, ml_collections.ConfigDict)
    assert base.observe.sinks == schema.Observe().sinks
    assert convert.from_mapping(schema.Config, base.to_dict()) == schema.Config()


def test_base_leaves_types_to_the_conversion():
    base = mappings.base()
    base.num_steps = "many"
    base.zero.stagee = 1
    with pytest.raises(ConfigError) as error:
        convert.from_mapping(schema.Config, base.to_dict())
    fields = {problem.field for problem in error.value.problems}
    assert fields == {"num_steps", "zero.stagee"}


@pytest.mark.parametrize("path", ["zero.stagee", "zero.stage.x", "nothing", ""])
def test_hint_of_an_unknown_path_is_none(path):
    assert mappings.type_of(path) is None


def test_described_config_is_gin_of_an_equal_config(tmp_path):
    groups = (schema.ParamGroup(pattern="a'b", weight_decay=0.5), schema.ParamGroup())
    config = schema.Config(
        directory="it's",
        optimizer=schema.Optimizer(clip_norm=math.inf, groups=groups),
        observe=schema.Observe(sinks=("csv",)),
    )
    path = tmp_path / "resolved.gin"
    path.write_text(describe.describe_config(config))
    assert gin.from_gin([str(path)]) == config


def test_what_is_off_is_not_printed():
    """Fails if a plain run prints schedules of stages, or bounds that bound nothing."""
    plain = describe.describe_config(schema.Config())
    assert "soft_cap" not in plain and "config.pipeline" not in plain
    given = ["model.logit_soft_cap=30.0", "mesh.pipeline=2", "processes.process_id=0"]
    text = describe.describe_config(zconfig.load_config({}, *given))
    assert {*text.splitlines()} - {*plain.splitlines()} == {
        "config.mesh.pipeline = 2",
        "config.pipeline = '1f1b'",
        "config.pipeline.recompute = True",
        "config.model.logit_soft_cap = 30.0",
        "config.processes.process_id = 0",
    }


def test_listing_names_every_setting_once_with_its_default():
    listed = [line.strip() for line in describe.describe_settings().splitlines()]
    text = describe.describe_config(zconfig.Config())
    for line in text.splitlines():
        name, value = line.removeprefix("config.").split(" = ")
        if value.endswith("  # derived"):
            value = "'derived'" if value.startswith("'") else "0"
        assert listed.count(f"{name} = {value}") == 1


def test_listing_explains_a_setting_and_its_choices():
    expected = """\
  zero.stage = 1
      0 shards nothing, 1 optimizer state and master weights, 2 also gradients, 3 also
      parameters. [0, 1, 2, 3]
"""
    assert expected in describe.describe_settings()


def test_every_setting_that_differs_is_listed_in_order():
    one = schema.Config(seed=1, optimizer=schema.Optimizer(peak_learning_rate=1e-3))
    assert differences(one, schema.Config()) == (
        ("seed", 1, 0),
        ("optimizer.peak_learning_rate", 1e-3, 3e-4),
    )


def test_a_config_is_itself_again_after_json():
    """Fails if lists, which JSON has for tuples, or infinity count as differences."""
    optimizer = schema.Optimizer(clip_norm=math.inf, groups=(schema.ParamGroup(),))
    config = schema.Config(optimizer=optimizer, xla_options=("a=1",))
    saved = json.loads(json.dumps(mappings.to_mapping(config)))
    assert convert.from_mapping(schema.Config, mappings.to_mapping(config)) == config
    assert differences(config, saved) == differences(saved, config) == ()


def test_an_entry_of_a_list_of_sections_is_named_by_its_place():
    def with_groups(*decays):
        groups = tuple(schema.ParamGroup(weight_decay=decay) for decay in decays)
        return schema.Config(optimizer=schema.Optimizer(groups=groups))

    assert differences(with_groups(0.0, 0.1), with_groups(0.0, 0.2)) == (
        ("optimizer.groups[1].weight_decay", 0.1, 0.2),
    )
    (found,) = differences(with_groups(0.0), with_groups())
    assert (found.setting, found.other) == ("optimizer.groups", ())


def test_a_setting_that_one_side_lacks_is_absent():
    assert differences({"seed": 1, "zero": {"stage": 1}}, {"zero": {"new": 2}}) == (
        ("seed", 1, ABSENT),
        ("zero.stage", 1, ABSENT),
        ("zero.new", ABSENT, 2),
    )
    assert repr(ABSENT) == "absent"
