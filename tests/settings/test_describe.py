"""Settings as text."""

import math

from zjax import config as zconfig
from zjax.config import gin
from zjax.settings import describe, schema


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
