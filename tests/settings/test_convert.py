"""Plain values become a Config, or one error that names every mistake."""

import json
import math

import ml_collections
import pytest

from zjax.config import gin, load
from zjax.errors import ConfigError
from zjax.settings import convert, describe, schema

SINKS = "use one of console, jsonl, csv, tensorboard, wandb, mlflow"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"zero": {"stagee": 1}},
            "zero.stagee=1 is not a setting; did you mean zero.stage?",
            id="misspelt",
        ),
        pytest.param(
            {"zero": {"qqq": 1}},
            "zero.qqq=1 is not a setting; use one of stage, min_shard_elements, "
            "memory, optimizer_memory, parameter_memory, nvme_paths, gradient_memory, "
            "delay_updates_from, shard_over_replica, secondary_partition, "
            "quantized_weights, quantized_gradients",
            id="unlike-any-setting",
        ),
        pytest.param(
            {"zer": {"stage": 1}},
            "zer={'stage': 1} is not a setting; did you mean zero?",
            id="misspelt-section",
        ),
        pytest.param(
            {"zero": {"stage": 4}},
            "zero.stage=4 is not a choice; use one of 0, 1, 2, 3",
            id="no-choice",
        ),
        pytest.param(
            {"lora": {"quantize": "int2"}},
            "lora.quantize='int2' is not a choice; use one of int8, int4, none",
            id="empty-choice",
        ),
        pytest.param(
            {"zero": {"stage": True}},
            "zero.stage=True is not a choice; use one of 0, 1, 2, 3",
            id="true-is-not-1",
        ),
        pytest.param(
            {"zero": {"stage": 2.0}},
            "zero.stage=2.0 is not a choice; use one of 0, 1, 2, 3",
            id="float-is-not-2",
        ),
        pytest.param(
            {"mesh": {"tensor": "2"}},
            "mesh.tensor='2' is a str; expected int",
            id="text-for-int",
        ),
        pytest.param(
            {"num_steps": 2.5},
            "num_steps=2.5 is a float; expected int",
            id="float-for-int",
        ),
        pytest.param(
            {"optimizer": {"b1": True}},
            "optimizer.rule.b1=True is a bool; expected float",
            id="bool-for-float",
        ),
        pytest.param(
            {"observe": {"plot": 1}},
            "observe.plot=1 is an int; expected bool: True or False",
            id="int-for-bool",
        ),
        pytest.param(
            {"optimizer": {"eps": math.nan}},
            "optimizer.rule.eps=nan is not a number; use a number",
            id="nan",
        ),
        pytest.param(
            {"zero": 3},
            "zero=3 is an int; "
            "expected a mapping with any of stage, min_shard_elements, "
            "memory, optimizer_memory, parameter_memory, nvme_paths, gradient_memory, "
            "delay_updates_from, shard_over_replica, secondary_partition, "
            "quantized_weights, quantized_gradients",
            id="number-for-section",
        ),
        pytest.param(
            {"directory": None},
            "directory=None is a NoneType; expected str",
            id="none",
        ),
        pytest.param(
            {"observe": {"sinks": "console"}},
            "observe.sinks='console' is a str; expected list or tuple",
            id="text-for-tuple",
        ),
        pytest.param(
            {"observe": {"sinks": ["console", "consle"]}},
            f"observe.sinks[1]='consle' is not a choice; {SINKS}",
            id="no-choice-inside-tuple",
        ),
        pytest.param(
            {"mesh": {"names": {"fsdp": None, 3: "mlp", "tp": "tensor"}}},
            "mesh.names['fsdp']=None is a NoneType; expected str, or '' for a dim that "
            "is not split\n"
            "mesh.names[3]='mlp' has a key that is not a str; use names of dims as "
            "keys",
            id="no-names-inside-a-table",
        ),
        pytest.param(
            {"mesh": {"names": ["tp"]}},
            "mesh.names=['tp'] is a list; expected a mapping of names to names",
            id="list-for-table",
        ),
        pytest.param(
            {"optimizer": {"groups": [{}, {"patern": "x"}]}},
            "optimizer.groups[1].patern='x' is not a setting; "
            "did you mean optimizer.groups[1].pattern?",
            id="misspelt-inside-group",
        ),
        pytest.param(
            {"seed": "a", "mesh": {"date": 1, "data": None}, 5: 1},
            "seed='a' is a str; expected int\n"
            "mesh.date=1 is not a setting; did you mean mesh.data?\n"
            "mesh.data=None is a NoneType; expected int\n"
            "5=1 is not a setting; use one of seed, num_steps, num_epochs, num_tokens, "
            "global_batch_size, num_microbatches, microbatch_size, elasticity, "
            "directory, deterministic, xla_options, mesh, pipeline, zero, precision, "
            "optimizer, communication, model, data, sequence_warmup, "
            "curriculum, buckets, random_ltd, layer_drop, evaluation, checkpoint, "
            "lora, distill, observe, processes",
            id="all-at-once",
        ),
    ],
)
def test_mistake_is_named_with_the_way_out(values, message):
    with pytest.raises(ConfigError) as error:
        convert.from_mapping(schema.Config, values)
    assert str(error.value) == message


def test_int_becomes_float():
    built = convert.from_mapping(schema.Optimizer, {"clip_norm": 2})
    assert type(built.clip_norm) is float


def test_infinity_is_a_float():
    assert convert.from_mapping(schema.Optimizer, {"clip_norm": math.inf})


def test_a_table_of_names_is_a_mapping_on_every_way_in():
    table = {"tp": "tensor", "fsdp": ""}
    changed = convert.base()
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
    assert json.loads(json.dumps(convert.to_mapping(again)))["mesh"]["names"] == table


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


def test_mapping_and_config_are_inverse():
    groups = (schema.ParamGroup(pattern="norm"),)
    config = schema.Config(seed=3, optimizer=schema.Optimizer(groups=groups))
    values = convert.to_mapping(config)
    assert convert.from_mapping(schema.Config, values) == config


def test_base_is_the_defaults_as_a_config_dict():
    base = convert.base()
    assert isinstance(base, ml_collections.ConfigDict)
    assert base.observe.sinks == schema.Observe().sinks
    assert convert.from_mapping(schema.Config, base.to_dict()) == schema.Config()


def test_base_leaves_types_to_the_conversion():
    base = convert.base()
    base.num_steps = "many"
    base.zero.stagee = 1
    with pytest.raises(ConfigError) as error:
        convert.from_mapping(schema.Config, base.to_dict())
    fields = {problem.field for problem in error.value.problems}
    assert fields == {"num_steps", "zero.stagee"}


@pytest.mark.parametrize("path", ["zero.stagee", "zero.stage.x", "nothing", ""])
def test_hint_of_an_unknown_path_is_none(path):
    assert convert.type_of(path) is None
