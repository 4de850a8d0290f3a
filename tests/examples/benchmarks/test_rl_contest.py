"""The contest of reinforcement learning: its settings, its judgement, its records."""

import copy
import json

import jax
import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, load
from tests.support.neighbours import importing
from zjax.config import check_config
from zjax.rl import tasks

RUN = {
    "stages": {
        "supervised, four fifths": {"pass_at_1": 0.345, "pass_at_8": 0.9},
        "supervised": {"pass_at_1": 0.35, "pass_at_8": 0.9},
        "grpo": {"pass_at_1": 0.9, "pass_at_8": 0.99},
    },
    "rewards": [(1, 0.3), (2, 0.6)],
    "seconds": 2.0,
}


@pytest.fixture
def program(monkeypatch):
    """The program, whose runs are not run."""
    module, trained = load("rl_quality"), []

    def train(*given):
        trained.append(given)
        return copy.deepcopy(RUN)

    monkeypatch.setattr(module, "train", train)
    module.trained = trained
    return module


@pytest.fixture
def measure(program, tmp_path, capsys):
    def run(*flags):
        program.main([f"--directory={tmp_path}", *flags])
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def example():
    with importing(FOLDER.parent / "rl") as load_example:
        return load_example("train")


@pytest.mark.parametrize("stage", ["supervised", "grpo"])
def test_the_settings_can_work_and_the_model_is_small(program, stage, tmp_path):
    words = program.words_of("sums", program.parse([]))
    given = [word for word in words if not word.startswith("--")]
    settings = example().of_stage(stage, given)
    config = example().load(stage, "sums", tmp_path, *settings)
    check_config(config, num_devices=1)
    assert config.num_steps == {"supervised": 10_000, "grpo": 200}[stage]
    params = jax.eval_shape(lambda: zjax.make_model(config).init(jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(params)) < 50e6


def test_the_contest_judges_each_task_by_its_worst_seed(program):
    (row,) = load_contest(FOLDER / "rl_learns.py").rows
    points = {x.metric: (x.must, x.aim) for x in row.cases if x.must}
    assert points == {f"{task}_points": (20, 30) for task in tasks.__all__}
    others = {x.metric for x in row.cases if not x.must}
    assert others == {f"{task}_any_of_eight" for task in tasks.__all__}


def test_finished_runs_are_not_run_again(program, measure, tmp_path):
    """Fails if a program that is called again loses or repeats its finished runs."""
    measure("--seeds=0", "--tasks=sums")
    assert [key[:2] for key in program.trained] == [("sums", 0)]
    found = measure("--at_once=1")
    assert sorted(key[:2] for key in program.trained) == sorted(
        (task, seed) for task in tasks.__all__ for seed in range(3)
    )
    assert found["sums_points"] == pytest.approx(55)
    assert found["reverse_any_of_eight"]["n"] == 3
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    measure("--seeds=0", "--tasks=sums", "grpo:num_steps=3")
    assert len(program.trained) == 10


def test_processes_share_a_device(program, measure):
    measure("--num_devices=2", "--at_once=2", "--seeds=0,1")
    variables = [given[-1] for given in program.trained]
    assert {x["CUDA_VISIBLE_DEVICES"] for x in variables} == {"0", "1"}
    assert {x["XLA_PYTHON_CLIENT_MEM_FRACTION"] for x in variables} == {"0.45"}


@pytest.mark.parametrize(
    ("stage", "rate", "message"),
    [
        ("supervised", 0.19, "sums, seed 0: a start of 19.0% is not in 20 to 60 %"),
        (
            "supervised, four fifths",
            0.335,
            "sums, seed 0: the start still rises, 33.5% to 35.0%",
        ),
    ],
)
def test_a_start_that_shows_nothing_is_refused(
    program, measure, monkeypatch, stage, rate, message
):
    monkeypatch.setitem(RUN["stages"][stage], "pass_at_1", rate)
    with pytest.raises(SystemExit) as error:
        measure("--seeds=0", "--tasks=sums")
    assert str(error.value) == message


def test_the_seed_that_gains_least_counts(program, tmp_path):
    """Fails if the mean or the best seed hides one that learns nothing."""
    records = program.quality_records.Records(tmp_path / "runs.jsonl", {"sums": 0})
    for seed, end in enumerate((0.9, 0.36, 0.8)):
        run = copy.deepcopy(RUN)
        run["stages"]["grpo"]["pass_at_1"] = end
        records.write("sums", seed, **run)
    found = program.compare(records, ["sums"], [0, 1, 2])
    assert found["sums_points"] == pytest.approx(1)


def test_a_run_that_fails_loses_no_other(program, measure, tmp_path, monkeypatch):
    def train(task, seed, *_):
        if task == "sums":
            raise SystemExit("sums, seed 0 failed:\nno memory")
        return copy.deepcopy(RUN)

    monkeypatch.setattr(program, "train", train)
    with pytest.raises(SystemExit, match="sums, seed 0 failed:\nno memory"):
        measure("--seeds=0")
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert {json.loads(x)["method"] for x in lines} == {"countdown", "reverse"}
