"""Every rule about settings, with the exact words that a user reads."""

import dataclasses

import pytest

from tests.support.refusals import refusal
from zjax import config as zconfig
from zjax.config.check import check_config
from zjax.errors import ConfigError
from zjax.settings import schema


def test_data_that_is_not_read_is_not_checked():
    """Fails if batches of a smaller vocabulary are held to the default data."""
    config = zconfig.load_config({"model.vocab_size": 51, "data.source": "tokens"})
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, source="standard_library")
    )
    with pytest.raises(ConfigError, match="below the 257 tokens"):
        check_config(config, 1)
    check_config(config, 1, user_batches=True)
    tokens = dataclasses.replace(config.data, source="tokens")
    check_config(dataclasses.replace(config, data=tokens), 1, user_batches=True)


def test_problems_are_reported_together():
    overrides = ["mesh.tensor=3", "zero.min_shard_elements=-1", "data.length=2048"]
    assert refusal(overrides, 8) == (
        "zero.min_shard_elements=-1 is out of range; use 0 or more\n"
        "mesh.tensor=3 does not divide 8 devices; use 1, 2, 4 or 8\n"
        "data.length=2048 exceeds model.max_length=1024; use at most 1024"
    )


def test_a_number_above_a_limit_hides_no_other_problem():
    overrides = "model.moe.top_groups=3;model.moe.num_groups=2;model.num_heads=5"
    assert refusal([*overrides.split(";"), "data.length=4096"], 8) == (
        "model.moe.top_groups=3 is above model.moe.num_groups=2; use at most 2\n"
        "model.num_heads=5 does not divide model.embed_size=768; use a divisor of 768, "
        "or set model.head_size\n"
        "data.length=4096 exceeds model.max_length=1024; use at most 1024"
    )
    rounds = "communication.local_steps"
    overrides = [f"{rounds}.num_steps=4", f"{rounds}.num_fragments=8"]
    assert refusal(overrides, 8) == (
        f"{rounds}.num_fragments=8 is above {rounds}.num_steps=4; use at most 4\n"
        f"{rounds}.num_steps=4 has no effect with mesh.replica=1; use mesh.replica=2 "
        f"or more, or {rounds}=None"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        "seed=0",
        "mesh.replica=2;zero.stage=0",
        "mesh.tensor=4;model.vocab_size=50257",
        "mesh.tensor=8;model.mlp_size=100",
        "mesh.tensor=8;model.num_heads=24;model.num_kv_heads=4",
        "optimizer.clip_norm=inf",
        "optimizer.weight_decay=0",
        "model.kind=encoder;model.positions=rotary",
        "precision.compute_dtype=float16;precision.loss_scale.window=0",
        "processes.coordinator=[::1]:99;processes.num_processes=2;processes.process_id=1",
        "observe.profile.start_step=1000",
        "num_steps=10;optimizer.schedule.num_warmup_steps=10",
    ],
)
def test_what_works_is_let_through(overrides):
    zconfig.check_config(zconfig.load_config({}, *overrides.split(";")), 8)


@pytest.mark.parametrize(("num_devices", "batch"), [(1, 32), (1_024, 1_024)])
def test_a_batch_fits_devices_of_any_number(num_devices, batch):
    config = zconfig.load_config({"global_batch_size": batch})
    zconfig.check_config(config, num_devices)


def test_own_model_is_not_held_to_the_built_in_one():
    config = zconfig.load_config({}, "data.length=4096")
    zconfig.check_config(config, 8, user_model=True)
    with pytest.raises(ConfigError):
        zconfig.check_config(config, 8)


def test_processes_are_checked_before_devices_are_known():
    """Whatever the rest says: that is for `check_config`."""
    given = schema.Processes(coordinator="node0:99", num_processes=2, process_id=2)
    with pytest.raises(ConfigError) as error:
        zconfig.check_processes(schema.Config(processes=given))
    assert str(error.value) == (
        "processes.process_id=2 is not one of 2 processes; use 0 to 1"
    )
    given = dataclasses.replace(given, coordinator="[::1]:99", process_id=1)
    for processes in (given, schema.Processes(), schema.Processes(coordinator="none")):
        zconfig.check_processes(schema.Config(num_steps=0, processes=processes))
