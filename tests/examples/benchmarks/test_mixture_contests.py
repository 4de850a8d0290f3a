"""The contests of mixtures of experts: what is counted, and small ones to the end."""

import dataclasses
import json
import sys

import jax
import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, config_of, load
from zjax.config import check_config
from zjax.models import flops


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


def test_uneven_groups_follow_zipf(program):
    cases = program("grouped_cases")
    for case in cases.ZIPF:
        sizes = sorted(case.sizes(), reverse=True)
        assert sum(sizes) == case.num_rows
        assert sizes[0] / sizes[3] == pytest.approx(4, rel=0.1)
        assert list(case.sizes()) not in (sizes, sizes[::-1])
    assert set(cases.SMALL.sizes()) == {128}


def test_operands_are_read_once(program):
    case = program("grouped_cases").SMALL
    # 16,384 rows of 1024 and of 4096 channels, 128 matrices, two bytes a number.
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


def test_two_devices_have_as_much_work_each_as_one(on_two):
    alone, both = on_two("ALONE"), on_two("BOTH")
    assert dataclasses.replace(both, mesh=alone.mesh) == alone
    assert (alone.mesh.expert, both.mesh.expert) == (1, 2)


def test_dense_and_experts_have_the_same_settings(on_two):
    experts, dense = on_two("EXPERTS"), on_two("DENSE")
    for section in ("zero", "precision"):
        assert getattr(experts, section) == getattr(dense, section)
    assert experts.data.length == dense.data.length == 2048
    assert experts.optimizer.rule.moment_dtype == dense.optimizer.rule.moment_dtype
    assert experts.model.remat == dense.model.remat


def test_the_mixture_without_offload_has_13_billion_parameters(on_two):
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
    assert flops.matmul_params(config.model) == peer.matmul_params
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
