"""A setting that nothing reads is refused, in the exact words that a user sees."""

import functools
import logging
import math

import pytest

from tests.support.proposals import CONFIGS
from zjax import config as zconfig
from zjax.config import effect, gin
from zjax.errors import ConfigError
from zjax.optim import build
from zjax.settings import describe, mappings, schema
from zjax.settings.mappings import to_mapping


def test_every_need_names_settings_and_choices_of_the_schema():
    for need in describe.NEEDS:
        for choice in need.choices:
            zconfig.load_config({}, {need.other: choice})
        assert mappings.type_of(need.setting) is not None


def test_settings_of_an_optimizer_that_is_not_used_are_refused():
    settings = schema.Optimizer(
        rule=schema.Adamw(b1=0.8, moment_dtype="int8"), ema_decay=0.9
    )
    config = schema.Config(optimizer=settings)
    zconfig.check_config(config, 8)
    with pytest.raises(ConfigError) as error:
        zconfig.check_config(config, 8, user_optimizer=True)
    assert str(error.value) == (
        "optimizer.rule.b1=0.8 has no effect on the optimizer that was given; leave it "
        "at "
        "0.9, or give no optimizer\n"
        "optimizer.rule.moment_dtype='int8' has no effect on the optimizer that was "
        "given; "
        "leave it at 'float32', or give no optimizer"
    )


def test_numbers_of_a_named_config_give_way_to_a_given_optimizer():
    """Fails if a user has to write defaults back, or a record has an unused rate."""
    config = zconfig.load_config("gpt2_124m", "num_steps=400")
    zconfig.check_config(config, 8, user_optimizer=True)
    assert config.optimizer.peak_learning_rate == 6e-4
    assert build.with_clipping_as_set(config.optimizer) == schema.Optimizer(
        clip_norm=math.inf
    )
    config = zconfig.load_config(config, "optimizer.peak_learning_rate=0.01")
    with pytest.raises(ConfigError) as error:
        zconfig.check_config(config, 8, user_optimizer=True)
    assert str(error.value) == (
        "optimizer.peak_learning_rate=0.01 has no effect on the optimizer that was "
        "given; leave it at 0.0003, or give no optimizer"
    )


def load_gin(*bindings):
    given = [f"config.{text}".replace("synthetic", "'synthetic'") for text in bindings]
    return gin.from_gin([str(CONFIGS / "llama_8b_3d.gin")], given)


@pytest.mark.parametrize(
    "load",
    [
        functools.partial(zconfig.load_config, "llama_8b_3d"),
        functools.partial(zconfig.load_config, CONFIGS / "llama_8b_3d.py"),
        load_gin,
    ],
    ids=["name", "path", "gin"],
)
def test_settings_of_a_named_config_give_way_to_those_of_a_user(load, caplog):
    """Fails if a smaller run of a config needs more flags than say how small it is."""
    small = ["model.num_layers=4", "model.embed_size=64", "model.num_heads=4"]
    small += ["global_batch_size=8", "data.source=synthetic"]
    with caplog.at_level(logging.WARNING):
        config = load(*small)
    zconfig.check_config(config, 8)
    assert (config.model.num_kv_heads, config.data.path) == (4, "")
    assert config.num_microbatches == 0 and config.model.mlp_size == 14_336
    assert [record.getMessage() for record in caplog.records] == [
        "data.path='data/llama' of llama_8b_3d gives way and is '': "
        "data.path='data/llama' has no effect with data.source='synthetic'",
        "model.num_kv_heads=8 of llama_8b_3d gives way and is 4: "
        "model.num_kv_heads=8 does not divide model.num_heads=4",
        "num_microbatches=16 of llama_8b_3d gives way and is 0: global_batch_size=8 "
        "does not divide by 1 batch shards x num_microbatches=16",
    ]


def test_what_a_user_sets_and_what_follows_from_nothing_does_not_give_way(caplog):
    """Fails if a setting of the user, or a method of the config, is switched off."""
    given = ["model.num_heads=4", "model.num_kv_heads=8", "data.source=synthetic"]
    given += ["data.path=mine", "model.num_layers=2"]
    config = zconfig.load_config("llama_8b_pipeline4", *given)
    with pytest.raises(ConfigError) as error:
        zconfig.check_config(config, 4)
    assert [problem.field for problem in error.value.problems] == [
        "data.path",
        "model.num_kv_heads",
        "mesh.pipeline",
    ]
    assert not caplog.records


def test_a_section_of_a_named_config_gives_way_unless_a_user_sets_something_inside(
    caplog,
):
    config = zconfig.load_config("gpt2_zeropp", "zero.stage=2", "mesh.data=4")
    assert config.zero.replicas is None
    zconfig.check_config(config, 8)
    assert caplog.messages == [
        "zero.replicas='sharded' of gpt2_zeropp gives way and is None: "
        "zero.replicas='sharded' has no effect with zero.stage=2"
    ]
    mine = "zero.replicas.quantized_weights=True"
    config = zconfig.load_config("gpt2_zeropp", "zero.stage=2", "mesh.data=4", mine)
    assert config.zero.replicas is not None


def test_settings_of_the_built_in_models_are_refused_for_another():
    config = schema.Config(precision=schema.Precision(matmul_dtype="float8"))
    zconfig.check_config(config, 8)
    with pytest.raises(ConfigError) as error:
        zconfig.check_config(config, 8, user_model=True)
    assert str(error.value) == (
        "precision.matmul_dtype='float8' has no effect on the model that was given; "
        "leave it out, or give no model"
    )


def test_a_derived_size_that_is_written_out_is_as_good_as_left_out():
    """Fails if the settings of a saved run cannot be read again."""
    config = zconfig.load_config({"model": {"max_length": 16}})
    saved = zconfig.load_config(to_mapping(config))
    assert list(effect.effect_problems(saved, 1)) == []
