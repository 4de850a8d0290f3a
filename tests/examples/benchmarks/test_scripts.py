"""The programs of `examples/benchmarks` that measure zjax in ways of their own."""

import argparse
import json
import os
import sys
import types

import jax
import pytest
from contests.contest import load_contest

from tests.support import small_run
from tests.support.benchmarks import FOLDER, config_of, load
from zjax.config import describe_config
from zjax.models import flops
from zjax.models.build import make_model


@pytest.fixture
def largest(monkeypatch):
    """Finds the largest model of a device on which `deepest` layers have room."""
    module = load("largest_model")

    def search(guess, deepest, *, grow="model.num_layers", unit=1, pool=32):
        trained = []

        def train(given, size, environment):
            share = "0.250000" if pool else "0.920000"
            assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == share
            trained.append(size)
            return {"num_devices": 2} if size <= deepest else None

        monkeypatch.setattr(module, "train", train)
        monkeypatch.setattr(module, "pool_fraction", lambda gigabytes: gigabytes / 128)
        monkeypatch.setattr(module, "call", lambda *_: (0, f"a warning\n{guess}\n"))
        given = argparse.Namespace(
            pool_gigabytes=pool, config="x.py", settings=[], grow=grow, unit=unit
        )
        return module.search(given), trained

    return search


@pytest.mark.parametrize(
    ("guess", "trained"), [(11, [11, 12]), (9, [9, 10, 11, 12]), (13, [13, 12, 11])]
)
def test_one_layer_more_is_shown_to_fail(largest, guess, trained):
    found, tried = largest(guess, deepest=11)
    assert (found["num_layers"], found["failed_num_layers"]) == (11, 12)
    assert found["size_times_devices"] == 22
    assert tried == trained


def test_one_unit_of_length_more_is_shown_to_fail(largest):
    grow = "data.length,model.max_length"
    found, tried = largest(48, deepest=50, grow=grow, unit=8, pool=None)
    assert (found["length"], found["failed_length"]) == (48, 56)
    assert tried == [48, 56]


def test_the_length_that_fits_is_read_off_a_straight_line(tmp_path, monkeypatch):
    """On eight devices, of which each has its part of the sequence."""
    module = load("largest_model")
    path = tmp_path / "small.gin"
    path.write_text(describe_config(small_run.make_config("run", "mesh.sequence=8")))
    room = 3 * 2**20
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": room})
    monkeypatch.setattr(module.jax, "local_devices", lambda: [device])
    grow = "data.length,model.max_length"
    given = argparse.Namespace(config=path, settings=[], grow=grow, unit=16)
    length = module.estimate(given)
    assert length % 16 == 0
    assert length > 8 * 16


def test_a_brief_trial_takes_two_steps(tmp_path):
    module = load("largest_model")
    path = tmp_path / "small.gin"
    path.write_text(describe_config(small_run.make_config("run", "mesh.sequence=2")))
    given = argparse.Namespace(
        config=str(path), settings=[], grow="data.length", unit=8, brief=True
    )
    simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    found = module.train(given, 16, os.environ | simulated)
    assert found["num_devices"] == 2
    assert found["step_seconds"]["n"] == 1
    assert found["loss"] < found["first_loss"]


def test_a_search_that_finds_no_end_says_so(largest):
    with pytest.raises(SystemExit, match="no end of the search after 8 trials"):
        largest(5, deepest=99)


def test_the_rate_of_a_model_counts_its_attention(tmp_path, monkeypatch, capsys):
    config = small_run.make_config("run")
    path = tmp_path / "small.gin"
    path.write_text(describe_config(config))
    module = load("model_flops")
    monkeypatch.setattr(sys, "argv", ["model_flops.py", str(path), "num_steps=9"])
    module.main()
    line = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(line.removeprefix("RESULT "))
    speed = found["tokens_per_second_per_device"]["median"]
    for name, count in (("causal", "half"), ("full", "full")):
        work = flops.flops_per_token(config.model, 16, causal_attention=count)
        expected = pytest.approx(speed * work / 1e12)
        assert found[f"tflops_{name}_attention"] == expected


def test_what_cannot_be_elsewhere_is_a_closed_form_of_the_model():
    """Fails if it has other numbers than the model, or follows a plan of ours."""
    module = load("offload_13b")
    config = config_of(module.get_contest().contestants[0])
    params, _ = jax.eval_shape(make_model(config).init, jax.random.key(0))
    number = sum(x.size for x in jax.tree.leaves(params))
    block, other = module.block_params(), module.other_params()
    assert number == config.model.num_layers * block + other
    # Three blocks and their gradients, embedding and head, 40 inputs and 14 numbers
    # for each of 16 x 1024 tokens, in bfloat16.
    by_hand = 6 * 314_639_360 + 262_809_600 + 54 * 16 * 1024 * 5120
    assert module.least_bytes() == 2 * by_hand
    assert config.microbatch_size * config.data.length == 16 * 1024


def test_the_machine_is_measured_by_programs_of_their_own(
    tmp_path, monkeypatch, capsys
):
    link, files = load("host_link"), load("direct_files")
    product = load("matrix_product")
    monkeypatch.setattr(product, "SIZE", 64)
    monkeypatch.setattr(link, "ARRAY_BYTES", 4096)
    monkeypatch.setattr(files, "FILE_BYTES", 4096)
    monkeypatch.setattr(sys, "argv", ["direct_files.py", str(tmp_path)])
    for module, names in (
        (link, {"link_bytes_per_second"}),
        (files, {"write", "read"}),
        (product, {"product_tflops"}),
    ):
        module.main()
        line = capsys.readouterr().out.removeprefix("RESULT ")
        found = json.loads(line)
        for name in names:
            assert found[name]["n"] == 5
            assert 0 < found[name]["min"] <= found[name]["median"]
    assert list(tmp_path.iterdir()) == []


def test_the_state_is_held_against_a_closed_form_of_the_shape():
    """Fails if the number comes from a run of ours, or a stage is taken for another."""
    contest = load_contest(FOLDER / "gpt_1p5b.py")
    (row,) = [row for row in contest.rows if row.id == "zero_memory"]
    formulas = [case.peer for case in row.cases if callable(case.peer)]
    stated = [[peer(devices) for devices in (1, 4)] for peer in formulas]
    # By hand: 48 layers of width 1600, 50,304 tokens, 1024 positions, the last norm.
    params = 48 * (12 * 1600**2 + 13 * 1600) + (50_304 + 1024 + 2) * 1600
    assert stated == [2 * [12 * params]] + 3 * [[12 * params, 3 * params]]


@pytest.fixture
def budget(monkeypatch, tmp_path):
    """Searches among lengths of which only those up to `longest` cost little enough."""
    module = load("longest_in_budget")
    path = tmp_path / "small.gin"
    sparse = ("model.kind=encoder", "model.vocab_size=300", "data.source=synthetic")
    path.write_text(describe_config(small_run.make_config("run", *sparse)))

    def search(longest, *, kind="time", dear=1.1):
        tried = []

        def cost(config):
            tried.append(config.data.length)
            assert config.model.max_length == config.data.length
            assert config.model.remat == "full"
            if config.model.num_layers == 2:  # dense
                return 1.0
            return 0.9 if config.data.length <= longest else dear

        monkeypatch.setitem(module.COSTS, kind, cost)
        given = argparse.Namespace(config=path, settings=["model.remat=full"], base=16)
        return module.search(given, kind, ["model.num_layers=2"]), tried

    return search


@pytest.mark.parametrize(
    ("kind", "dear"), [("time", 1.1), ("memory", 1.1), ("time", None)]
)
@pytest.mark.parametrize(
    ("longest", "found", "failed", "tried"),
    [
        (70, 64, 96, [16, 32, 64, 128, 96]),
        (100, 96, 128, [16, 32, 64, 128, 96]),
        (16, 16, 24, [16, 32, 16, 24]),
    ],
)
def test_the_longest_sequence_costs_no_more(
    budget, kind, dear, longest, found, failed, tried
):
    result, all_tried = budget(longest, kind=kind, dear=dear)
    assert result == {
        f"length_in_{kind}": found,
        f"failed_length_in_{kind}": failed,
        f"budget_of_{kind}": 1.0,
    }
    assert all_tried == tried


def test_a_search_for_a_longest_sequence_that_finds_none_says_so(budget):
    with pytest.raises(SystemExit, match="16 tokens already cost more than the dense"):
        budget(15)
    with pytest.raises(SystemExit, match="1024 tokens still cost less: no end of the"):
        budget(10**9)


def test_a_step_that_does_not_fit_has_no_time(monkeypatch):
    module = load("longest_in_budget")

    def fails(config, **options):
        raise module.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(module, "measure", fails)
    assert module.seconds(None) is None
