"""Differences between configs, named by setting."""

import json
import math

from zjax.config import compare, convert, schema


def with_groups(*patterns):
    groups = tuple(schema.ParamGroup(pattern=pattern) for pattern in patterns)
    return schema.Config(optimizer=schema.Optimizer(groups=groups))


def test_each_difference_names_its_setting_and_both_values():
    first = schema.Config(seed=3, zero=schema.Zero(stage=2))
    second = schema.Config(optimizer=schema.Optimizer(clip_norm=math.inf))
    assert compare.differences(first, second) == [
        ("seed", 3, 0),
        ("zero.stage", 2, 1),
        ("optimizer.clip_norm", 1.0, math.inf),
    ]


def test_a_config_that_json_gave_back_differs_in_nothing():
    config = with_groups("a", "b")
    saved = json.loads(json.dumps(convert.to_mapping(config)))
    assert compare.differences(saved, config) == []
    assert compare.digest(saved) == compare.digest(config)


def test_entries_of_lists_are_compared_one_by_one():
    found = compare.differences(with_groups("a", "b"), with_groups("a", "c"))
    assert found == [("optimizer.groups[1].pattern", "b", "c")]
    assert str(found[0]) == "optimizer.groups[1].pattern: 'b', 'c'"
    longer = compare.differences(with_groups("a"), with_groups("a", "b"))
    assert ("optimizer.groups[1].pattern", compare.ABSENT, "b") in longer
    none = compare.differences(with_groups(), with_groups("a"))
    assert ("optimizer.groups[0].pattern", compare.ABSENT, "a") in none


def test_a_setting_of_another_version_is_absent_here():
    saved = convert.to_mapping(schema.Config()) | {"old": 1}
    del saved["seed"]
    assert compare.differences(saved, schema.Config()) == [
        ("old", 1, compare.ABSENT),
        ("seed", compare.ABSENT, 0),
    ]


def test_the_digest_follows_every_setting_but_those_left_out():
    config = schema.Config()
    other = schema.Config(zero=schema.Zero(stage=3))
    assert len(compare.digest(config)) == 64
    assert compare.digest(config) != compare.digest(other)
    left_out = ["zero.stage"]
    assert compare.digest(config, without=left_out) == compare.digest(
        other, without=left_out
    )
