"""The contests of pipelines: on any number of devices, and small ones to the end."""

import json

import jax
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, config_of, load
from zjax.cli.bench import measure
from zjax.config import check_config, load_config
from zjax.settings import axes

SMALL = (
    "model.num_layers=4",
    "model.embed_size=16",
    "model.mlp_size=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.vocab_size=64",
    "model.max_length=16",
    "data.length=16",
    "optimizer.peak_learning_rate=1e-2",
    "num_microbatches=8",
)
NUM_DEVICES = 4


def contestants_of(name):
    contest = load_contest(FOLDER / f"{name}.py")
    return {x.name: x for x in contest.contestants if x.kind == "zjax"}


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(
    "name", ["pipeline_bubble", "pipeline_schedules", "pipeline_vs_deepspeed"]
)
def test_there_are_as_many_stages_as_devices(name, num_devices):
    for contestant in contestants_of(name).values():
        config = config_of(contestant, num_devices=num_devices)
        if "--stages={devices}" in contestant.command:
            check_config(load("stage_alone").one_stage(config, num_devices), 1)
        else:
            check_config(config, num_devices)
            assert axes.axis_sizes(config, num_devices)["pipeline"] == num_devices


@pytest.mark.parametrize(("num_devices", "num_shares"), [(4, 1), (8, 2)])
def test_three_dimensions_take_a_sequence_per_device(num_devices, num_shares):
    for name, contestant in contestants_of("three_d").items():
        config = config_of(contestant, num_devices=num_devices)
        check_config(config, num_devices)
        assert config.global_batch_size == num_devices
        sizes = axes.axis_sizes(config, num_devices)
        found = sizes["pipeline"], sizes["tensor"], sizes["data"], config.zero.stage
        ours, alone = (2, 2, num_shares, 1), (1, 1, num_devices, 3)
        assert found == (ours if name == "three dimensions" else alone)


@pytest.mark.parametrize(
    ("contest", "name"),
    [
        pytest.param("pipeline_bubble", "8 microbatches", marks=pytest.mark.slow),
        pytest.param("pipeline_schedules", "1F1B", marks=pytest.mark.slow),
        pytest.param("pipeline_schedules", "interleaved", marks=pytest.mark.slow),
        ("pipeline_schedules", "ZB-H1"),
    ],
)
def test_a_small_pipeline_is_measured(contest, name):
    chunks = 2 if name == "interleaved" else 1
    layers = f"model.num_layers={NUM_DEVICES * chunks}"
    config = config_of(contestants_of(contest)[name], *SMALL, layers)
    devices = jax.devices()[:NUM_DEVICES]
    found = measure(config, devices=devices, num_warm_up=2, num_rounds=1)
    assert found.num_devices == NUM_DEVICES
    step, speed = found.step_seconds, found.tokens_per_second_per_device
    assert speed.median * step.median == pytest.approx(8 * 16 / NUM_DEVICES)


def test_a_stage_alone_has_its_share_and_more_turns():
    contestant = contestants_of("pipeline_bubble")["a stage alone for 16"]
    config = config_of(contestant)
    found = load("stage_alone").one_stage(config, 4)
    assert (found.model.num_layers, found.model.vocab_size) == (4, 50304 // 4)
    assert found.num_microbatches == 16 + 3
    same = "model.num_layers=16", "model.vocab_size=50304", "num_microbatches=16"
    assert load_config(found, *same) == config
    largest = load("stage_alone").one_stage(config, 3)
    assert (largest.model.num_layers, largest.model.vocab_size) == (6, 50304 // 3)


def test_a_small_stage_alone_is_measured(capsys):
    contestant = contestants_of("pipeline_bubble")["a stage alone for 8"]
    words = contestant.words("python", NUM_DEVICES)[2:]
    load("stage_alone").main([*words, *SMALL])
    line = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["num_devices"] == 1
    speed = found["tokens_per_second_per_device"]["median"]
    turns = 8 + NUM_DEVICES - 1
    assert speed * found["step_seconds"]["median"] == pytest.approx(turns * 16)
    width, layers, vocabulary = 16, 4 // NUM_DEVICES, 64 // NUM_DEVICES
    block = 4 * width**2 + 2 * 32 * width + 9 * width + 32
    assert found["num_params"] == layers * block + (vocabulary + 16 + 2) * width
