"""What training on rounded matrices recovers: its judgement, records and shares."""

import json
import pathlib

import jax
import numpy as np
import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, TINY, load
from zjax.config import check_config

SMALL = *TINY, "optimizer.peak_learning_rate=0.01", "lora.rank=2"


@pytest.fixture
def program(monkeypatch, tmp_path):
    """The program on a few files, whose matrices need lose nothing."""
    module = load("qat_quality")
    text = module.compress_start.package_text
    files = sorted(pathlib.Path(zjax.__file__).parent.glob("ops/*.py"))

    def prepare_text(directory):
        if not directory.exists():
            text.prepare.prepare(
                files, directory, tokenizer="bytes", validation_fraction=0.2
            )

    monkeypatch.setattr(text, "prepare_text", prepare_text)
    monkeypatch.setattr(module, "LEAST_GAP", -1)
    return module


def result_of(capsys):
    """The result on the last line, behind the progress of trainers."""
    return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))


def test_the_settings_can_work_and_the_model_is_no_toy(program, tmp_path):
    start = program.compress_start
    config = start.make_config(tmp_path, tmp_path / "text", "model.vocab_size=4096")
    check_config(config, num_devices=1)
    for how, more in program.HOW.items():
        further = zjax.load_config(config, program.FURTHER, more, program.rules("int4"))
        check_config(further, num_devices=1)
        assert (further.lora is None) == (how == "full")
    params = jax.eval_shape(lambda: zjax.make_model(config).init(jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(params)) > 123e6


def test_the_contest_judges_full_training_and_lora():
    (row,) = load_contest(FOLDER / "qat_recovery.py").rows
    assert {x.metric: (x.must, x.aim) for x in row.cases} == {
        "full_recovered": (0.60, 0.80),
        "lora_recovered": (0.45, 0.60),
    }


def test_shares_and_types_of_codes(program):
    """Fails if the gap is taken from the wrong run, or a type that loses nothing."""
    plain = {"plain": 2.0, "int4": 2.005, "int3": 2.5}
    assert program.recovered(plain, {"rounded": 2.1}, "int3") == pytest.approx(0.8)
    program.LEAST_GAP = 0.01
    assert program.choose_weights([plain]) == "int3"
    assert program.choose_weights([plain | {"int4": 2.02}]) == "int4"
    with pytest.raises(SystemExit, match="rounding to int3 loses less than"):
        program.choose_weights([plain | {"int3": 2.001}])


@pytest.mark.slow
def test_a_tiny_run_has_shares_and_resumes(program, tmp_path, capsys, monkeypatch):
    """Fails if merged or rounded weights are not those of the run, or runs repeat."""
    words = [
        f"--directory={tmp_path}",
        f"--start={tmp_path / 'start'}",
        f"--text={tmp_path / 'text'}",
        "--seeds=0",
        *SMALL[:-1],
    ]
    monkeypatch.setitem(program.HOW, "lora", program.LORA | {"lora": {"rank": 2}})
    program.main(words)
    found = result_of(capsys)
    assert np.isfinite([found["full_recovered"], found["lora_recovered"]]).all()
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    runs = {record["method"]: record for record in map(json.loads, lines)}
    assert {*runs} == {"full, plain", "full, int4", "lora, plain", "lora, int4"}
    for how in ("full", "lora"):
        plain = runs[f"{how}, plain"]
        assert plain["plain"] != plain["int4"] != plain["int3"]
        assert abs(plain["int4"] - plain["plain"]) < 0.05
    monkeypatch.setattr(program, "train", None)
    program.main(words)
    assert result_of(capsys) == found
