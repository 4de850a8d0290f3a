"""The example of reinforcement learning: its files, its configs, and a tiny run."""

import inspect
import json
import pathlib
import runpy

import pytest

import zjax
from tests.support.benchmarks import ROOT
from tests.support.neighbours import importing, run
from zjax.config import check_config
from zjax.data import store
from zjax.rl import tasks
from zjax.rl.tasks.operands import held_out_operands

FOLDER = ROOT / "examples" / "rl"
STAGES = ("supervised", "grpo", "dpo", "reward_model", "ppo")
TINY = (
    "--num_traces=60",
    "--num_prompts=16",
    "--num_held_out=4",
    "model.num_layers=1",
    "model.embed_size=16",
    "model.num_heads=2",
    "supervised:num_steps=5",
    "grpo:num_steps=2",
    "optimizer.schedule.num_warmup_steps=1",
    "evaluation.num_batches=1",
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_example(name):
    with importing(FOLDER) as load:
        return load(name)


@pytest.mark.parametrize("stage", STAGES)
def test_each_config_can_work(stage):
    check_config(zjax.load_config(FOLDER / f"{stage}.py"), num_devices=1)


@pytest.mark.parametrize("name", tasks.__all__)
def test_traces_are_right_and_held_out_pairs_are_new(name, tmp_path):
    task = getattr(tasks, name)
    sizes = {"num_traces": 60, "num_prompts": 50, "num_held_out": 20}
    example = runpy.run_path(str(FOLDER / "data.py"))
    example["write_data"](task, tmp_path, **sizes, error_rate=0)
    traces = lines(tmp_path / "traces.jsonl")
    solved = task.rows(60, seed=0)
    for trace, row in zip(traces, solved, strict=True):
        assert trace["prompt"] == row["prompt"]
        assert task.reward(completion=trace["completion"], **row) == 1
    prompts, held_out = (
        lines(tmp_path / f"{x}.jsonl") for x in ("prompts", "held_out")
    )
    operands = inspect.signature(task.rows).parameters["operands"].default
    new = held_out_operands(operands)
    assert all(x in new for row in held_out for x in row["operands"])
    for row in [*solved, *prompts]:
        assert sum(x in new for x in row["operands"]) < 2
    assert (len(prompts), len(held_out)) == (50, 20)
    assert store.read_meta(str(tmp_path / "traces")).has_answers


def test_files_of_a_task_are_whole_or_missing(tmp_path, monkeypatch):
    """Fails if a program that was stopped leaves a part, which stages then read."""
    example, sizes = load_example("data"), {"num_traces": 60, "num_held_out": 4}
    folder, write = tmp_path / "data", example.write_lines
    with monkeypatch.context() as patch:
        patch.setattr(example, "write_lines", lambda path, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            example.write_data(tasks.sums, folder, num_prompts=8, **sizes)
    assert not folder.exists()
    assert example.write_lines is write
    example.write_data(tasks.sums, folder, num_prompts=8, **sizes)
    names = {"traces", "traces.jsonl", "prompts.jsonl", "held_out.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(SystemExit, match="exists already: remove it"):
        example.write_data(tasks.sums, folder, num_prompts=8, **sizes)


def test_sizes_of_files_that_exist_are_no_others(tmp_path):
    """Fails if a second run ignores the sizes that a user gives."""
    example, sizes = load_example("data"), {"num_traces": 60, "num_held_out": 4}
    folder = tmp_path / "data"
    example.find_data(tasks.sums, folder, {"num_prompts": 8, **sizes})
    example.find_data(tasks.sums, folder, sizes)
    example.find_data(tasks.sums, folder, {})
    told = f"--num_held_out=5 is not the 4 rows of {folder}/held_out.jsonl: leave it "
    with pytest.raises(SystemExit, match=f"^{told}out, or name another --directory$"):
        example.find_data(tasks.sums, folder, {"num_held_out": 5})


@pytest.mark.parametrize("name", tasks.__all__)
def test_a_teacher_errs_at_a_rate_and_from_a_random_line_on(name):
    """Fails if traces that err are right, or are of another prompt from the start."""
    task = getattr(tasks, name)
    make = runpy.run_path(str(FOLDER / "data.py"))["make_traces"]
    solved = task.rows(400, seed=0)
    traces = make(task, 400, 0.65)
    assert [x["prompt"] for x in traces] == [row["prompt"] for row in solved]
    found = [
        (task.reward(completion=x["completion"], **row), x["completion"], row)
        for x, row in zip(traces, solved, strict=True)
    ]
    wrong = [(text, task.trace(row)) for right, text, row in found if not right]
    assert 0.58 < len(wrong) / 400 < 0.70
    first = [a.split("\n")[0] == b.split("\n")[0] for a, b in wrong]
    assert 0.35 < sum(first) / len(wrong) < 0.8
    assert make(task, 400, 0.65) == traces


def test_settings_of_a_stage_are_of_this_stage_alone():
    of_stage = load_example("train").of_stage
    settings = ("seed=1", "grpo:num_steps=2", "data.path=a:b", "ppo:seed=3")
    assert of_stage("grpo", settings) == ["seed=1", "num_steps=2", "data.path=a:b"]
    assert of_stage("supervised", settings) == ["seed=1", "data.path=a:b"]


def test_a_card_keeps_the_stages_of_its_file(tmp_path, monkeypatch, capsys):
    """Fails if a run that resumes loses or repeats what was examined."""
    report = load_example("report")
    texts = [("1+1\n", [("2", 1.0), ("3", 0.0)])]
    monkeypatch.setattr(report, "solve", lambda trainer, task, rows: texts)
    report.Card(tmp_path / "card.json", None, []).examine("start", None)
    monkeypatch.delattr(report, "solve")
    card = report.Card(tmp_path / "card.json", None, [])
    card.examine("start", None)
    card.show()
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].split() == ["start", "50.0%", "100.0%"]
    assert shown[-1] == "start, right: '1+1\\n2'"


def test_a_card_is_whole_where_a_program_was_stopped(tmp_path, monkeypatch):
    """Fails if a part of a file replaces what was examined."""
    report, path = load_example("report"), tmp_path / "card.json"
    texts = [("1+1\n", [("2", 1.0), ("3", 0.0)])]
    monkeypatch.setattr(report, "solve", lambda trainer, task, rows: texts)
    report.Card(path, None, []).examine("start", None)
    before, write = path.read_text(), pathlib.Path.write_text

    def stopped(self, text):
        write(self, text[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        report.Card(path, None, []).examine("grpo", None)
    assert path.read_text() == before
    assert [x.name for x in tmp_path.iterdir()] == ["card.json"]


def test_pairs_are_of_prompts_with_a_right_and_a_wrong_text(tmp_path):
    """Fails if a wrong text is preferred, or a prompt without a choice is a pair."""
    mixed = [(f"{n}+1\n", [("no", 0.0), (f"{n + 1}", 1.0)]) for n in range(30)]
    all_right, all_wrong = ("2+2\n", [("4", 1.0)] * 2), ("3+3\n", [("4", 0.0)] * 2)
    example = runpy.run_path(str(FOLDER / "data.py"))
    with pytest.raises(SystemExit, match="train the start for longer"):
        example["write_pairs"](tmp_path, [all_right, all_wrong])
    assert not [*tmp_path.iterdir()]
    example["write_pairs"](tmp_path, [*mixed, all_right, all_wrong])
    first, *_ = pairs = lines(tmp_path / "pairs.jsonl")
    assert first == {"prompt": "0+1\n", "chosen": "1", "rejected": "no"}
    assert len(pairs) == 30


def test_pass_rates_count_texts_and_prompts():
    report = runpy.run_path(str(FOLDER / "report.py"))
    texts = [("a", [("", 1.0), ("", 0.0)]), ("b", [("", 0.0), ("", 0.0)])]
    assert report["pass_rates"](texts) == (0.25, 0.5)


@pytest.mark.slow
def test_the_example_runs_to_its_report_card(tmp_path):
    shown = run(FOLDER / "train.py", f"--directory={tmp_path}", *TINY, seconds=300)
    card = shown.partition("held-out prompts")[2].splitlines()
    assert card[0].split() == ["pass@1", "pass@8"]
    stages = [line.rsplit(maxsplit=2)[0].strip() for line in card[1:4]]
    assert stages == ["supervised, four fifths", "supervised", "grpo"]
    assert sum(line.startswith("grpo, ") for line in card) == 3
    assert (tmp_path / "sums" / "grpo" / "checkpoints" / "2").is_dir()
