"""What `compression_training` means: rules of rounding, and refusals with a remedy."""

import pytest

from zjax import deepspeed
from zjax.config import load_config
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


EIGHT = {}, {"params": {"bits": 8}, "modules": ["*"]}


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


def test_sections_that_are_off_mean_nothing():
    off = {"shared_parameters": {"enabled": False}}
    found = convert(weight_quantization=off, sparse_pruning=off)
    assert not found.problems()
    assert load_config({}, found.settings).quantize is None


PRUNING = "leave it out: zjax prunes no matrices"
ON = {"shared_parameters": {"enabled": True}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"layer_reduction": {"enabled": True}},
            "compression_training.layer_reduction='1 keys' is not supported; leave it "
            "out; set checkpoint.init_from to the teacher, model.num_layers to "
            "keep_number_layer and prune.layers.numbers to teacher_layer",
        ),
        (
            {"head_pruning": ON},
            "compression_training.head_pruning='1 keys' is not supported; " + PRUNING,
        ),
        (
            {"weights": ({"rounding": "stochastic"}, bits(8))},
            "compression_training.weight_quantization.shared_parameters.rounding="
            "'stochastic' is not supported; use 'nearest'",
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
