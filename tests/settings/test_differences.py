"""Two configs are compared setting by setting, also across JSON and versions."""

import json
import math

from zjax.settings import convert, schema
from zjax.settings.describe import ABSENT, differences


def test_equal_configs_have_no_difference():
    assert differences(schema.Config(seed=1), schema.Config(seed=1)) == ()


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
    saved = json.loads(json.dumps(convert.to_mapping(config)))
    assert differences(config, saved) == ()
    assert differences(saved, config) == ()


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
