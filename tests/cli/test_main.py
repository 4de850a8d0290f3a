"""The command line, as a user types it."""

import functools
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from tests.support import huggingface as golden
from tests.support import programs, small_run
from tests.support.refusals import listed
from zjax.cli import main
from zjax.config import describe_config, load_config
from zjax.huggingface import adapter_settings
from zjax.run.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[2]
TWICE = ("checkpoint.every_steps=4", "evaluation.every_steps=4", small_run.EVALUATED)
"""Settings of a run that is evaluated, and saved, twice."""
ZJAX = (sys.executable, "-m", "zjax")
EACH_IN_A_FORK = """
import gc, json, os, sys
from zjax.cli import main
gc.freeze()
for line in sys.stdin:
    folder, output, words = json.loads(line)
    if not os.fork():
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.argv[1:] = words
        try:
            code = main.run()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)  # without the second that Python takes to end
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Runs commands one after another, and imports zjax once.

Like the script, it has not the current folder among those of modules.
"""


@functools.cache
def runner():
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-c", EACH_IN_A_FORK],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def end_of_runner():
    yield
    if runner.cache_info().currsize:
        runner().communicate()


def run_code(folder, *words):
    """The status of a command, and what it prints."""
    with tempfile.NamedTemporaryFile("r") as output:
        asked = json.dumps((str(folder), output.name, words))
        print(asked, file=runner().stdin, flush=True)
        return int(runner().stdout.readline()), output.read()


def run_in(folder, *words, code=0):
    found, out = run_code(folder, *words)
    assert found == code, out
    return out


def run(*words, code=0):
    return run_in(ROOT, *words, code=code)


def run_each(folder, commands):
    """Status and output of commands by name."""
    return {name: run_code(folder, *words) for name, words in commands.items()}


def start(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return programs.started([*ZJAX, *words], cwd=ROOT, **pipes)


@pytest.fixture
def settings(tmp_path):
    """A Gin file of a small run in a directory of its own."""
    path = tmp_path / "small.gin"
    config = small_run.make_config(tmp_path / "run", "checkpoint.every_steps=4")
    path.write_text(describe_config(config))
    return f"--gin_file={path}"


def test_flags_have_the_defaults_that_runs_were_made_with():
    found = {
        f"{name} --{flag}": command.flags[flag].default
        for name, command in main.COMMANDS.items()
        for flag in command.flags
        if command.flags[flag].default
    }
    assert found == {
        "train --prompt": "def ",
        "tune --trials": 4,
        "generate --part": "auto",
        "generate --step": "latest",
        "generate --prompt": "def ",
        "generate --temperature": 0.8,
        "generate --top_k": 40,
        "generate --top_p": 1.0,
        "generate --text_field": "prompt",
        "generate --repetition_penalty": 1.0,
        "generate --num_samples": 1,
        "generate --max_rows": 64,
        "generate --weight_dtype": "compute",
        "generate --cache_dtype": "compute",
        "plan --max_rows": 64,
        "plan --weight_dtype": "compute",
        "plan --cache_dtype": "compute",
        "bench --weight_dtype": "compute",
        "bench --cache_dtype": "compute",
        "serve --part": "auto",
        "serve --step": "latest",
        "serve --host": "127.0.0.1",
        "serve --port": 8000,
        "serve --max_rows": 64,
        "serve --weight_dtype": "compute",
        "serve --cache_dtype": "compute",
        "serve --max_requests": 256,
        "serve --max_request_rows": 128,
        "serve --max_body_bytes": 8_388_608,
        "serve --max_unread_bytes": 1_048_576,
        "serve --request_seconds": 600.0,
        "serve --drain_seconds": 30.0,
        "evaluate --part": "auto",
        "evaluate --step": "latest",
        "data prepare --examples": "texts",
        "data prepare --tokenizer": "bytes",
        "data prepare --text_field": "text",
        "data prepare --validation_fraction": 0.01,
        "data analyze --metrics": ["seqreo", "voc"],
        "data teach --top_k": 64,
        "export --part": "auto",
        "export --step": "latest",
        "compress --part": "auto",
        "compress --recipe": "w4a16_gptq",
        "compress --step": "latest",
        "export --format": "safetensors",
        "rewind --step": "latest",
    }


def test_train_then_generate_then_export(tmp_path, settings):
    out = run("train", settings, "--simulated_devices=8")
    assert "plan: ZeRO 2 on mesh (data=8)" in out
    assert f"checkpoint: {tmp_path / 'run' / 'checkpoints' / '8'}" in out
    weights = tmp_path / "weights.safetensors"
    out = run("export", settings, f"--output={weights}", "--dtype=bfloat16")
    assert f"wrote {weights}" in out
    assert "bytes: weights raw of step 8\n" in out
    table = safetensors.load_file(weights)["embedding.tokens"]
    assert table.shape == (61, 16)
    run("export", settings, "--format=hf", "--dtype=bfloat16")
    folder = tmp_path / "run" / "huggingface"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    theirs = safetensors.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(theirs["transformer.wte.weight"], table)


def test_evaluate_says_the_loss_that_the_run_said(tmp_path, settings):
    """Fails if the command evaluates other rows, weights or steps than the run did."""
    small_run.fit(tmp_path / "run", *TWICE, "optimizer.ema_decay=0.5")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    told = {row["step"]: row for row in map(json.loads, lines) if "eval_loss" in row}
    same = ("optimizer.ema_decay=0.5", small_run.EVALUATED)
    more = ("--simulated_devices=8", *(f"--gin=config.{each}" for each in same))
    out = run("evaluate", settings, *more, "--step=4")
    assert "weights: ema of step 4\n" in out
    shown, last = out.splitlines()[-2:]
    assert shown.startswith("weights ema of step 4  eval loss ")
    found = json.loads(last)
    assert (found["part"], found["step"], found["evaluated_rows"]) == ("ema", 4, 16)
    assert found["eval_loss"] == pytest.approx(told[4]["eval_loss"], rel=1e-6)
    assert told[4]["eval_loss"] != told[8]["eval_loss"]


def test_a_run_describes_itself_and_knows_its_best_step(tmp_path):
    """Fails if --run takes other settings, or best is the newest step."""
    late = ("optimizer.peak_learning_rate=3.0", "optimizer.schedule.num_warmup_steps=8")
    small_run.fit(tmp_path / "run", *TWICE, *late, "checkpoint.resume=never")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    told = {row["step"]: row for row in map(json.loads, lines) if "eval_loss" in row}
    assert told[4]["eval_loss"] < told[8]["eval_loss"]
    (tmp_path / "run").rename(tmp_path / "moved")
    run_of = (f"--run={tmp_path / 'moved'}", "--step=best")
    out = run("evaluate", *run_of, "--config.evaluation.num_batches=2")
    found = json.loads(out.splitlines()[-1])
    assert (found["step"], found["evaluated_rows"]) == (4, 32)
    assert found["eval_perplexity"] == pytest.approx(np.exp(found["eval_loss"]))
    out = run("export", *run_of)
    assert f"wrote {tmp_path / 'moved' / 'model.safetensors'}" in out
    assert "weights raw of step 4\n" in out
    drawn = "--temperature=9", "--seed=1", "--max_rows=1", "--simulated_devices=1"
    text = run("generate", *run_of, *drawn, "--prompt=5").splitlines()[-1]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("5\n5 6\n5\n")
    out = run("generate", *run_of, *drawn, f"--file={prompts}")
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [row["prompt"] for row in rows] == ["5", "5 6", "5"]
    assert rows[0]["text"] == rows[2]["text"] == text
    assert rows[1]["text"].startswith("5 6")
    of = f"--run={tmp_path / 'moved'}"
    out = run("train", of, "--config.num_steps=9", "--simulated_devices=8")
    assert "8 shares x 1 microbatches; continues at step 8, ends at 9\n" in out
    assert f"\nevery array of the plan: zjax plan {of} --config.num_steps=9" in out
    assert max(small_run.losses(tmp_path / "moved")) == 9


def test_a_run_from_an_adapter_of_peft_is_evaluated_and_continued(tmp_path):
    """Fails if a command computes without the adapter, or reads its files again."""
    base = golden.copy("llama", tmp_path / "base")
    adapter = tmp_path / "adapter"
    shutil.copytree(golden.FOLDER.parent / "peft" / "rslora", adapter)
    lora = {f"lora.{name}": x for name, x in adapter_settings(adapter).items()}
    settings = (
        *("num_steps=2", "evaluation.num_batches=1", "observe.plot=False"),
        *("optimizer.schedule.num_warmup_steps=0", f"directory={tmp_path / 'run'}"),
    )
    config = golden.make_config("llama", *settings, directory=base)
    trainer = Trainer(load_config(config, lora), devices=jax.devices()[:1])
    trainer.fit()
    trainer.close()
    wanted = trainer.evaluate()["eval_loss"]
    text = trainer.generate("5", max_new_tokens=4, temperature=0.0)
    for folder in (base, adapter):
        shutil.rmtree(folder)
    of = (f"--run={tmp_path / 'run'}", "--simulated_devices=1")
    greedy = ("--prompt=5", "--max_new_tokens=4", "--temperature=0")
    typed = {"loss": ("evaluate", *of), "text": ("generate", *of, *greedy)}
    said = {name: out for name, (_, out) in run_each(tmp_path, typed).items()}
    assert "settings that differ" not in said["loss"]
    found = json.loads(said["loss"].splitlines()[-1])
    assert (found["part"], found["step"]) == ("raw", 2)
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert said["text"].splitlines()[-1] == text


def test_two_processes_train_as_one_and_stop_together_on_a_signal(tmp_path, settings):
    """Fails if processes read the wrong rows, do not average over each other, save
    different steps, or none."""
    constant = "optimizer.schedule=constant"
    small_run.fit(tmp_path / "alone", constant)
    words = ("--num_processes=2", "train", settings, "--simulated_devices=4")
    longer = "--gin=config.num_steps=400", "--gin=config.optimizer.schedule='constant'"
    path = tmp_path / "run" / "metrics.jsonl"
    with start("launch", *words, *longer) as program:
        programs.wait_until(
            lambda: path.exists() and '"step": 8,' in path.read_text(), program
        )
        program.send_signal(signal.SIGTERM)
        out, _ = programs.finish(program)
    assert program.returncode == 143, out
    assert "process" in out
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert f"stopped at step {max(steps)}" in out
    told = small_run.losses(tmp_path / "run")
    assert max(told) == max(steps) < 400
    alone = small_run.losses(tmp_path / "alone")
    together = [told[step] for step in alone]
    np.testing.assert_allclose(together, list(alone.values()), rtol=1e-5)


def test_plan_prints_arrays_stages_and_the_compiled_program(tmp_path, settings):
    picture = tmp_path / "plan.png"
    words = ("--simulated_devices=8", "--collectives", f"--output={picture}")
    out = run("plan", settings, *words)
    assert "blocks/mlp/up/kernel" in out
    assert "bytes per device by ZeRO stage on 8 devices\n" in out
    assert (
        "\nmost that a step compiled for CPUs takes, predicted for the program: tra"
        in out
    )
    assert (
        "\nA program for CPUs keeps the scores of attention and computes bf16 in f32: "
        "its\ntemporaries are not those of a program for GPUs.\n"
    ) in out
    assert "\na step on GPUs by its traced program, attention as a kernel" in out
    assert "what one device sends in a train step, Psi = " in out
    assert "\nZeRO 2 should move " in out
    assert "\nCompiled for CPUs: bf16 is sent as f32" in out
    assert picture.stat().st_size > 5_000
    table = out[out.index("plan: ") : out.index("picture: ")]
    assert max(map(len, table.splitlines())) <= 100


def test_plan_for_devices_that_are_not_here_is_an_estimate(tmp_path, settings):
    more = (
        "--num_devices=1024",
        "--gin=config.global_batch_size=1024",
        "--gin=config.mesh.tensor=2",
    )
    rows = run("plan", "--num_params=7.5e9").splitlines()
    assert rows[-3].split() == ["64", "120", "31.4", "16.6", "1.88"]  # of the paper
    out = run("plan", settings, *more, f"--output={tmp_path / 'plan.png'}")
    assert "on 1024 devices (estimate: the devices are not here)" in out
    assert "whole over tensor=2: " in out
    assert "a step compiled" not in out


def test_prepared_text_is_trained_on(tmp_path, settings):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"line {i} of a text\n" * 20}) for i in range(40)]
    text.write_text("\n".join(lines))
    tokens = tmp_path / "tokens"
    words = (f"--input={text}", f"--output={tokens}", "--validation_fraction=0.2")
    out = run("data", "prepare", *words)
    assert "with a vocabulary of 257" in out
    changes = {
        "data.source": "'tokens'",
        "data.path": f"'{tokens}'",
        "model.vocab_size": 257,
        "data.packing": "'documents'",
    }
    bindings = [f"--gin=config.{name}={value}" for name, value in changes.items()]
    out = run("train", settings, "--simulated_devices=8", *bindings)
    assert "sample:\ndef " in out


def test_samples_are_analyzed_and_the_printed_command_reads_them(tmp_path):
    """Fails if a module in the user's folder is not found, or rows are not the run's.

    The longest document is row 0, and begins with the highest letter.
    """
    (tmp_path / "mine.py").write_text("def score(tokens): return tokens[0]\n")
    lines = [json.dumps({"text": chr(65 + n) * 2 * n}) for n in range(6, 12)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    inputs = ("--input=text.jsonl", "--output=tokens", "--validation_fraction=0")
    run_in(tmp_path, "data", "prepare", *inputs)
    rows = {"source": "tokens", "path": "tokens", "length": 24, "packing": "documents"}
    words = [f"--config.data.{name}={value}" for name, value in rows.items()]
    words += ["--metrics=mine:score,seqreo", "--output=an index", "--num_processes=1"]
    out = run_in(tmp_path, "data", "analyze", *words)
    lines = [line for line in out.splitlines() if "\u2501" not in line]
    assert [line.split() for line in lines if line.startswith(("mine", "seqreo"))] == [
        ["mine:score", "71", "71", "73", "75", "76", "6"],
        ["seqreo", "13", "13", "17", "21", "23", "6"],
    ]
    assert any(line.startswith("6 samples in ") for line in lines)
    assert (tmp_path / "an index" / "metrics.png").stat().st_size > 5_000
    command = shlex.split(lines[-1].partition(": ")[2])
    assert command[0] == "python"
    printed = [sys.executable, *command[1:]]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.check_output(printed, cwd=tmp_path, env=environ, text=True)
    assert found == "[5 4 3 2 1 0]\n"
    again = run_in(tmp_path, "data", "analyze", *words, code=2)
    remedy = "remove it, or name another folder"
    assert again == (
        f"zjax: output='an index' holds mine.score.index already; {remedy}\n"
        f"output='an index' holds seqreo.index already; {remedy}\n"
    )


def test_mistakes_end_with_their_remedies_and_without_a_traceback(settings):
    bindings = ("--gin=config.zero.stage=4", "--gin=config.mesh.tensr=2")
    out = run("train", settings, *bindings, code=2)
    assert out == (
        "zjax: mesh.tensr=2 is not a setting; did you mean mesh.tensor?\n"
        "zero.stage=4 is not a choice; use one of 0, 1, 2, 3\n"
    )


def test_what_a_command_does_not_read_is_refused(tmp_path):
    refused = listed("cli.txt")
    typed = {x: (*shlex.split(x), "--simulated_devices=8") for x in refused}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = run_each(tmp_path, typed)
    assert found == {words: (2, f"{said}\n") for words, said in refused.items()}
    assert not pathlib.Path("/nope").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("check", "a", "b"),
            "command='zjax check' cannot be read (unrecognized arguments: b); use zjax "
            "check [-h] directory",
        ),
        (
            ("launch", "--num_processes=x"),
            "command='zjax launch' cannot be read (argument --num_processes: invalid "
            "int value: 'x'); use zjax launch [--num_processes NUM_PROCESSES]",
        ),
    ],
    ids=["check", "launch"],
)
def test_words_that_cannot_be_read_end_in_one_form(words, message, monkeypatch, capsys):
    """Fails if argparse tells a mistake in its own form."""
    monkeypatch.setattr(sys, "argv", ["zjax", *words])
    with pytest.raises(SystemExit) as end:
        sys.exit(main.run())
    assert capsys.readouterr().err == f"zjax: {message}\n"
    assert end.value.code == 2


def test_launch_wants_a_number_and_a_command(tmp_path):
    wanted = {
        "--num_processes=0": "--num_processes=0 is below 1",
        "--num_processes=100000": "is above 1024",
        "--num_processes=2": "no command to launch",
    }
    found = run_each(tmp_path, {flag: ("launch", flag) for flag in wanted})
    for flag, message in wanted.items():
        code, said = found[flag]
        assert code == 2 and message in said


def test_commands_are_listed_and_machines_described(tmp_path):
    names = "", "nonsense", "help", "report --simulated_devices=2", "config"
    names += ("--version",)
    found = run_each(tmp_path, {f"zjax {name}": name.split() for name in names})
    codes, said = zip(*found.values(), strict=True)
    assert codes == (0, 2, 0, 0, 0, 0)
    for name, command in main.COMMANDS.items():
        assert f"\n  {name:14}{command.summary}\n" in said[0]
    assert said[1] == (
        "zjax: command='nonsense' is not a command; zjax help lists them\n"
    )
    assert said[2] == said[0]
    assert "memory kinds" in said[3]
    assert "zero.stage" in said[4]
    version = importlib.metadata.version
    assert said[5] == f"zjax {version('zjax')}, jax {version('jax')}\n"


def test_each_command_has_help_of_its_own_flags(tmp_path):
    """Fails if a flag is missing, or one of another command is shown."""
    typed = {f"{name} --help": f"{name} --help".split() for name in main.COMMANDS}
    found = run_each(tmp_path, typed | {"again": ("help", "data", "prepare")})
    every = {flag for command in main.COMMANDS.values() for flag in command.flags}
    for name, command in main.COMMANDS.items():
        code, said = found[f"{name} --help"]
        assert code == 0
        assert said.startswith(f"zjax {name} ")
        assert f"\n{command.summary}\n" in said
        assert f"\n  {command.examples.splitlines()[0]}\n" in said
        own, _, _ = said.partition("\nSettings of the run:")
        own, _, _ = own.partition("\nFlags of all commands:")
        shown = set(re.findall(r"^  --(\w+)", own, re.MULTILINE))
        assert shown & every == set(command.flags)
        assert ("--config=FILE " in said) == (
            command.has_settings and not command.arguments
        )
        assert max(map(len, said.splitlines())) <= 88
    assert found["again"] == found["data prepare --help"]


def test_help_of_what_is_launched(tmp_path):
    """Fails if the help of launch itself is shown, or processes start."""
    words = ("launch", "--num_processes=2")
    typed = {
        "own": ("train", "--help"),
        "after": (*words, "train", "--help"),
        "before": ("help", *words, "train"),
        "two": (*words, "data", "analyze", "-h"),
        "launch": (*words, "--help"),
        "of-launch": ("help", "launch"),
    }
    said = {name: text for name, (_, text) in run_each(tmp_path, typed).items()}
    assert said["own"] == said["after"] == said["before"]
    assert said["own"].startswith("zjax train ")
    assert said["two"].startswith("zjax data analyze ")
    assert said["launch"] == said["of-launch"]
    assert said["launch"].startswith("zjax launch ")


def test_help_of_a_flag_has_its_kind_choices_and_default(tmp_path):
    typed = {"generate": ("generate", "-h"), "prepare": ("data", "prepare", "--help")}
    found = run_each(tmp_path, typed)
    words = " ".join(found["generate"][1].split())
    assert "--temperature=NUMBER 0 takes the most likely token. Default 0.8." in words
    assert "--prompt=TEXT Text to continue. Default 'def '." in words
    assert (
        "--part=KIND Which weights; auto takes averaged ones. One of auto, ema, "
        "schedule_free, raw. Default auto."
    ) in words
    assert (
        "--input=TEXT Text, JSON, Parquet, Arrow, or a folder; may be repeated. --"
    ) in " ".join(found["prepare"][1].split())
