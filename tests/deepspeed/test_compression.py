"""What `compression_training` means: rules of rounding, kept layers, and refusals."""

import pytest

from tests.support.refusals import config_error
from zjax import deepspeed
from zjax.config import check_config, load_config
from zjax.settings.prune import Listed, Prune
from zjax.settings.quantize import Rule


def convert(weights=None, activations=None, **sections):
    given = dict(sections)
    for name, one in {"weight": weights, "activation": activations}.items():
        if one is not None:
            shared, group = one
            given[f"{name}_quantization"] = {
                "shared_parameters": {"enabled": True} | shared,
                "different_groups": {"one": group},
            }
    values = {"train_batch_size": 8, "compression_training": given}
    return deepspeed.convert(values)


def bits(number, modules=("*",), start=None):
    params = {"start_bits": start or number, "target_bits": number}
    return {"params": params, "modules": [*modules]}


EIGHT = {"schedule_offset": 0}, {"params": {"bits": 8}, "modules": ["*"]}


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        (({"quantize_groups": 64}, bits(4)), None, ("int4", "compute")),
        (({"quantize_weight_in_forward": True}, bits(8)), EIGHT, ("int8", "int8")),
        (None, EIGHT, ("compute", "int8")),
    ],
)
def test_rounding_of_all_modules_is_a_rule(weights, activations, expected):
    found = convert(weights, activations)
    assert not found.problems()
    (rule,) = load_config({}, found.settings).quantize.rules
    assert rule == Rule(
        weights=expected[0], group_size=0, activations=expected[1], pattern=".*"
    )


REDUCTION = {
    "enabled": True,
    "keep_number_layer": 3,
    "module_name_prefix": "transformer.h",
    "teacher_layer": [1, 3, 5],
    "other_module_name": ["transformer.wte", "transformer.ln_f"],
}
REMEDIES = {
    "sparse": "leave it out: no masks of weights are trained",
    "row": "leave it out; prune takes hidden channels away where model.mlp_size is "
    "smaller",
    "head": "leave it out; prune takes heads away where model.num_heads and "
    "model.num_kv_heads are smaller",
    "channel": "leave it out: no channels of convolutions are taken",
}


def pruning(is_on):
    group = {"params": {"dense_ratio": 0.5, "num_heads": 12}, "modules": ["output"]}
    return {
        f"{name}_pruning": {
            "shared_parameters": {"enabled": is_on, "method": "topk"},
            "different_groups": {"one": group},
        }
        for name in REMEDIES
    }


def test_sections_that_are_off_mean_nothing():
    off = {"shared_parameters": {"enabled": False}}
    reduction = REDUCTION | {"enabled": False}
    given = pruning(False) | {"layer_reduction": reduction}
    found = convert(weight_quantization=off, **given)
    assert not found.problems()
    rows = [row for row in found.rows if row.key.startswith("compression_training")]
    assert {row.verdict for row in rows} == {"not needed"} and len(rows) == 26
    config = load_config({}, found.settings)
    assert config.quantize is None and config.prune is None


def test_pruning_of_matrices_is_refused_by_name():
    found = [str(problem) for problem in convert(**pruning(True)).problems()]
    assert found == [
        f"compression_training.{name}_pruning='5 keys' is not supported; {remedy}"
        for name, remedy in REMEDIES.items()
    ]


@pytest.mark.parametrize("left_out", ["", "keep_number_layer"])
def test_kept_layers_are_a_start_from_the_teacher(left_out):
    given = {name: x for name, x in REDUCTION.items() if name != left_out}
    found = convert(layer_reduction=given)
    assert not found.problems()
    config = load_config({}, found.settings)
    assert config.prune == Prune(layers=Listed(numbers=(1, 3, 5)))
    assert config.model.num_layers == 3
    with config_error(
        "checkpoint.init_from='' names no larger model to start from; give the "
        "directory of a run or of a Hugging Face checkpoint"
    ):
        check_config(config, 1)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"teacher_layer": [3, 1, 5]},
            "teacher_layer=[3, 1, 5] copies layers in another order, and prune keeps "
            "the teacher's; sort them, each once",
        ),
        (
            {"teacher_layer": [1, "3", 5]},
            "teacher_layer=[1, '3', 5] lists no numbers; write whole numbers",
        ),
        (
            {"teacher_layer": None},
            "teacher_layer=None is missing; name the layers to keep",
        ),
        (
            {"keep_number_layer": 4},
            "keep_number_layer=4 is not the number of layers of teacher_layer, 3; use "
            "3",
        ),
    ],
)
def test_layers_that_no_start_keeps_are_refused(changed, expected):
    found = convert(layer_reduction=REDUCTION | changed)
    (problem,) = found.problems()
    assert str(problem) == f"compression_training.layer_reduction.{expected}"
    assert "prune.layers.numbers" not in found.settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"weights": ({"rounding": "stochastic"}, bits(8))},
            "compression_training.weight_quantization.shared_parameters.rounding="
            "'stochastic' is not supported; use 'nearest'",
        ),
        (
            {"activations": ({}, EIGHT[1])},
            "compression_training.activation_quantization.shared_parameters."
            "schedule_offset=None is 1000 where it is missing, which is not supported; "
            "use 0",
        ),
        (
            {"weights": ({}, bits(1))},
            "compression_training.weight_quantization.different_groups.one.params."
            "target_bits=1 is not supported; use 3 or 4 or 8",
        ),
        (
            {"weights": ({}, bits(4, start=8))},
            "compression_training.weight_quantization.different_groups.one.params."
            "start_bits=8 is not supported; use 4, the bits at the end",
        ),
        (
            {"weights": ({}, bits(8, modules=["attention.self"]))},
            "compression_training.weight_quantization.different_groups.one.modules="
            "['attention.self'] is not supported; give quantize.rules with paths of "
            "zjax, such as blocks/attention/query",
        ),
    ],
)
def test_what_no_rule_means_is_refused(given, expected):
    found = convert(**given)
    assert [str(problem) for problem in found.problems()] == [expected]
    assert "quantize.rules" not in found.settings


def test_keys_that_deepspeed_lacks_are_named():
    found = convert(weights=({"schedule_ofset": 100}, bits(8)))
    assert [str(problem) for problem in found.problems()] == [
        "compression_training.weight_quantization.shared_parameters.schedule_ofset="
        "100 is not a key of DeepSpeed; leave it out"
    ]
