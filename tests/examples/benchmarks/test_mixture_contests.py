"""The contests of mixtures of experts and pipelines: small ones to the end."""

import dataclasses
import json
import sys

import jax
import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, config_of, load
from zjax.config import check_config, load_config
from zjax.models import flops
from zjax.models.build import make_model
from zjax.run.bench import measure
from zjax.settings import axes


@pytest.fixture
def program(monkeypatch):
    """Loads a program whose rounds are as short as can be."""

    def load_short(name):
        module = load(name)
        timing = getattr(module, "call_timing", module)
        monkeypatch.setattr(timing, "ROUND_SECONDS", 0)
        return module

    return load_short


def printed(module, monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["program.py", *flags])
    module.main()
    return json.loads(capsys.readouterr().out.removeprefix("RESULT "))


def assert_are_rates(found, metrics):
    for metric in metrics:
        assert found[metric]["n"] == 7
        assert 0 < found[metric]["min"] <= found[metric]["median"]


def test_small_groups_are_measured(program, monkeypatch, capsys):
    module = program("grouped_ours")
    small = {"num_groups": 4, "in_size": 8, "out_size": 16, "num_rows": 24}
    for name in ("ZIPF", "SMALL"):
        given = getattr(module.cases, name)
        several = given if isinstance(given, tuple) else (given,)
        made = tuple(dataclasses.replace(case, **small) for case in several)
        value = made if isinstance(given, tuple) else made[0]
        monkeypatch.setattr(module.cases, name, value)
    found = printed(module, monkeypatch, capsys)
    module = program("copy_bandwidth")
    found |= printed(module, monkeypatch, capsys, "--num_floats=1024")
    for row in load_contest(FOLDER / "grouped_matmul.py").rows:
        assert_are_rates(found, [case.metric for case in row.cases])
    assert_are_rates(found, ["copy_bytes_per_second"])


def test_uneven_groups_follow_zipf_and_all_count_their_work(program):
    cases = program("grouped_cases")
    for case in cases.ZIPF:
        sizes = sorted(case.sizes(), reverse=True)
        assert sum(sizes) == case.num_rows
        assert sizes[0] / sizes[3] == pytest.approx(4, rel=0.1)
        assert list(case.sizes()) not in (sizes, sizes[::-1])
    case = cases.SMALL
    assert set(case.sizes()) == {128}
    # Operands are read once: 16,384 rows of 1024 and of 4096 channels, 128
    # matrices, two bytes a number.
    assert case.num_bytes == 2 * (16_384 * (1024 + 4096) + 128 * 1024 * 4096)
    assert case.flops == 2 * 16_384 * 1024 * 4096


@pytest.mark.parametrize("only", ["Qwen3-30B", "experts top-"])
def test_small_layers_are_measured(program, monkeypatch, capsys, only):
    module = program("moe_ours")
    small = {"embed_size": 8, "mlp_size": 16, "num_experts": 4, "num_tokens": 16}
    for name in ("GATED", "WITH_CAPACITY"):
        layers = getattr(module.cases, name)
        made = tuple(
            dataclasses.replace(x, top_k=min(x.top_k, 2), **small) for x in layers
        )
        monkeypatch.setattr(module.cases, name, made)
    found = printed(module, monkeypatch, capsys, f"--only={only}")
    rows = load_contest(FOLDER / "moe_layer.py").rows
    metrics = {case.metric for row in rows for case in row.cases if only in case.name}
    assert metrics
    assert_are_rates(found, metrics)


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_layer_has_all_of_its_gradients(program, is_gated):
    """Fails if the compiler may leave a part of the work out."""
    module = program("moe_ours")
    layer = module.cases.Layer("small", 8, 16, 4, 2, 16, is_gated)
    x, kernel, experts, _ = module.make_arrays(layer)
    (out, loss), gradients = module.make_call(layer)()
    assert out.shape == x.shape
    assert (loss > 0) != is_gated
    found, expected = map(jax.tree.leaves, (gradients, (x, kernel, experts)))
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert all(abs(each).max() > 0 for each in found)


def test_a_layer_counts_the_products_of_its_experts(program):
    cases = program("moe_cases")
    layer = cases.Layer("gated", 3, 5, 4, 2, 7)
    # Forward and twice as much backward: 14 rows, three matrices of 3 x 5.
    assert layer.flops == 3 * 14 * 3 * 2 * 15
    assert dataclasses.replace(layer, is_gated=False).flops == 3 * 14 * 2 * 2 * 15


def test_the_fastest_way_that_runs_counts(program, capsys):
    timing = program("call_timing")

    def fail():
        raise RuntimeError("no kernel")

    ways = {"broken": fail, "fine": int}
    assert len(timing.time_fastest(ways, id, "x", min_calls=2)) == timing.ROUNDS
    assert "x, broken: no kernel" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="x: no way to compute it runs"):
        timing.time_fastest({"broken": fail}, id, "x")


@pytest.fixture
def on_two():
    """The settings of a contestant on two devices, by its name in the contest."""
    module = load("moe_on_two")
    contestants = {x.name: x for x in module.get_contest().contestants}
    return lambda name: config_of(contestants[getattr(module, name)])


def test_mixtures_on_two_devices_are_compared_fairly(on_two):
    """As much work for each device; the same settings as without experts."""
    alone, both = on_two("ALONE"), on_two("BOTH")
    assert dataclasses.replace(both, mesh=alone.mesh) == alone
    assert (alone.mesh.expert, both.mesh.expert) == (1, 2)
    experts, dense = on_two("EXPERTS"), on_two("DENSE")
    for section in ("zero", "precision"):
        assert getattr(experts, section) == getattr(dense, section)
    assert experts.data.length == dense.data.length == 2048
    assert experts.optimizer.rule.moment_dtype == dense.optimizer.rule.moment_dtype
    assert experts.model.remat == dense.model.remat
    config = on_two("LARGE")
    assert flops.num_params(config.model) == 13_149_534_208
    assert not config.zero.offloads_state


def test_peers_train_the_mixtures_of_zjax(program):
    """Fails if a peer has another model, or other tokens in a step."""
    contest = load("moe_step")
    contestants = {x.name: x for x in contest.get_contest().contestants}
    config = config_of(contestants[contest.QWEN3])
    peer = load("mixtures").QWEN3
    assert flops.num_params(config.model) == peer.num_params
    model = make_model(config)
    row = flops.flops_per_row(model, model.inputs)
    # The losses of the router multiply a few numbers per token.
    expected = pytest.approx(6 * peer.matmul_params * peer.length, rel=1e-4)
    assert row.products == expected
    assert config.microbatch_size == peer.microbatch_size
    assert config.data.length == peer.length
    config, shape = config_of(contestants[contest.OURS]), contest.GPT
    dense = dataclasses.replace(config.model, moe=None)
    assert flops.num_params(dense) == shape.num_params
    assert config.microbatch_size == shape.microbatch_size
    assert config.data.length == shape.length
    mixture = config.model.moe
    assert (mixture.num_experts, mixture.every, mixture.top_k) == (64, 2, 1)


def test_smaller_mixtures_have_at_most_half_of_the_parameters(program):
    quality = program("moe_quality")
    configs = {name: quality.make_config(name) for name in quality.MODELS}
    for config in configs.values():
        check_config(config, 1)
    count = {name: flops.num_params(x.model) for name, x in configs.items()}
    assert count["PR-MoE"] <= 0.5 * count["MoE"]
    assert configs["student"].model.num_layers < configs["PR-MoE"].model.num_layers
    assert count["student"] < count["PR-MoE"]


@pytest.mark.slow
def test_the_quality_of_smaller_mixtures_is_measured(program, monkeypatch, capsys):
    module = program("moe_quality")
    one_layer = {"model.num_layers": 1}
    models = {"MoE": {}, "PR-MoE": {"model.moe.residual": True}, "student": one_layer}
    monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setattr(module, "use_program_cache", lambda: None)
    settings = zjax.load_config(
        {"num_steps": 4, "global_batch_size": 8, "zero": {"stage": 0}},
        {"model": {"num_layers": 2, "embed_size": 16, "num_heads": 2}},
        {"model.max_length": 16, "model.moe.num_experts": 2},
        {"evaluation.num_batches": 1, "optimizer.schedule.num_warmup_steps": 1},
    )
    monkeypatch.setattr(module, "SETTINGS", settings)
    found = printed(module, monkeypatch, capsys, "--seeds=2")
    (row,) = load_contest(FOLDER / "pr_moe_quality.py").rows
    assert {case.metric for case in row.cases} <= found.keys()
    assert found["pr_moe_over_moe"]["n"] == found["distilled_over_alone"]["n"] == 2
    losses = found["losses"]
    assert losses[module.DISTILLED] != losses["student"]


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
