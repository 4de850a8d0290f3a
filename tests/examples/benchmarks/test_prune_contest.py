"""What distillation closes of the gap of pruned models: judgement and a tiny run."""

import json

import numpy as np
import pytest
from contests.contest import load_contest

import zjax
from tests.examples.benchmarks.test_qat_contest import result_of
from tests.support.benchmarks import FOLDER, TINY, load
from zjax.config import check_config

SMALL = *TINY, "optimizer.peak_learning_rate=0.01", "model.num_layers=2"


@pytest.fixture
def program():
    return load("prune_quality")


def test_the_contest_asks_for_smaller_gaps():
    (row,) = load_contest(FOLDER / "layer_reduction.py").rows
    assert not row.higher_is_better
    assert {x.metric: (x.must, x.aim) for x in row.cases} == {
        "depth_gap_ratio": (0.7, 0.5),
        "width_gap_ratio": (0.7, 0.5),
    }


def test_shapes_halve_the_model_and_settings_can_work(program):
    """Fails if the students are no smaller, or a setting has no effect."""
    settings = program.compress_start.SETTINGS
    large = zjax.load_config(settings, "data.path=tokens", "model.vocab_size=4096")
    shapes = program.shapes_of(large.model)
    for shape, sizes in {"depth": (8, 12, 3072), "width": (17, 6, 1536)}.items():
        teaching = {"distill": program.TEACHING | {"teacher": "runs/large"}}
        more = program.FURTHER, {"model": shapes[shape]}, teaching
        config = zjax.load_config(large, *more, "checkpoint.init_from=runs/large")
        check_config(config, num_devices=1)
        model = config.model
        assert (model.num_layers, model.num_heads, model.mlp_size) == sizes
        assert model.head_size == large.model.head_size


def test_the_ratio_is_of_gaps(program):
    full, plain, taught = ({"loss": x} for x in (2.0, 3.0, 2.6))
    assert program.gap_ratio(full, plain, taught) == pytest.approx(0.6)


@pytest.mark.slow
def test_a_tiny_run_has_ratios_and_resumes(program, tmp_path, capsys, monkeypatch):
    """Fails if a student does not start from the larger model, or runs repeat."""
    text = tmp_path / "text"
    monkeypatch.setitem(program.FURTHER, "prune", {"num_rows": 8})
    monkeypatch.setattr(program.compress_start.package_text, "prepare_text", small_text)
    words = [f"--directory={tmp_path}", f"--start={tmp_path / 'start'}"]
    words += [f"--text={text}", "--seeds=0", *SMALL]
    program.main(words)
    found = result_of(capsys)
    assert np.isfinite([found["depth_gap_ratio"], found["width_gap_ratio"]]).all()
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    runs = {record["method"]: record["loss"] for record in map(json.loads, lines)}
    assert len({*runs.values()}) == 5
    record = json.loads((tmp_path / "width-taught-0" / "pruned.json").read_text())
    assert len(record["kept"]["hidden"][0]) == 64
    monkeypatch.setattr(program.qat_quality, "train", None)
    program.main(words)
    assert result_of(capsys) == found


def small_text(directory):
    """Prepares a few files of the library."""
    package_text = load("package_text")
    if not directory.exists():
        files = sorted((FOLDER.parents[1] / "zjax" / "ops").glob("*.py"))
        package_text.prepare.prepare(
            files, directory, tokenizer="bytes", validation_fraction=0.2
        )
