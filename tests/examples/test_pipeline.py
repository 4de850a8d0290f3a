"""The example from text to a server: its report, and a tiny run of all stages."""

import contextlib
import types

import pytest

import zjax
from tests.support.benchmarks import ROOT
from tests.support.neighbours import importing, run
from zjax.config import check_config

FOLDER = ROOT / "examples" / "pipeline"
TINY = (
    "--num_traces=60",
    "--num_prompts=16",
    "--num_held_out=4",
    "model.num_layers=1",
    "model.embed_size=16",
    "model.num_heads=2",
    "optimizer.schedule.num_warmup_steps=1",
    "evaluation.num_batches=1",
    "pretraining:num_steps=2",
    "supervised:num_steps=5",
    "grpo:num_steps=2",
    "grpo:rl.rollout.num_prompts=2",
)


@pytest.fixture
def example():
    with importing(FOLDER, ROOT / "examples" / "rl") as load:
        yield load("run")


def test_the_decoder_is_the_decoder_of_the_next_stages():
    """Fails if pre-trained weights do not fit the supervised start."""
    config = zjax.load_config(FOLDER / "pretraining.py")
    check_config(config, num_devices=1)
    supervised = zjax.load_config(ROOT / "examples" / "rl" / "supervised.py")
    assert config.model == supervised.model


def test_the_report_shows_each_stage_and_the_server(example, tmp_path):
    card = example.report.Card(tmp_path / "card.json", None, [])
    card.stages = {
        "grpo": {"pass_at_1": 0.5, "pass_at_8": 1.0, "samples": [("ab\n", "ba", 1.0)]}
    }
    quantised = tmp_path / "grpo-q8_0.gguf"
    quantised.write_bytes(bytes(1_700))
    example.write_report(tmp_path / "report.md", card, quantised, "cd\n", "dc")
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "| grpo | 50.0% | 100.0% |" in lines
    assert "`grpo-q8_0.gguf` takes 2 kB, and was read back." in lines
    assert "- grpo, right: `'ab\\nba'`" in lines
    assert lines[-1] == "`zjax serve` was asked `'cd\\n'`, and wrote `'dc'`."


def test_a_server_that_writes_another_text_is_an_error(example, tmp_path, monkeypatch):
    writer = types.SimpleNamespace(
        generate=lambda *_: [example.zjax.Text(0, 0, "right", [1], [2], "stop")]
    )

    @contextlib.contextmanager
    def open_writer(*_):
        yield writer

    trainer = types.SimpleNamespace(run=None, state=None)
    monkeypatch.setattr(example, "ask_server", lambda run, prompt: "wrong")
    monkeypatch.setattr(example.train, "run", lambda *_: trainer)
    monkeypatch.setattr(example.zjax, "Generator", open_writer)
    with pytest.raises(SystemExit, match="the server wrote 'wrong', and the run 'ri"):
        example.check_server(tmp_path, [], "ab\n")


@pytest.mark.slow
def test_the_example_runs_from_text_to_a_server(tmp_path):
    run(FOLDER / "run.py", f"--directory={tmp_path}", *TINY, seconds=600)
    report = (tmp_path / "reverse" / "report.md").read_text()
    assert "`zjax serve` was asked `'mrs mdy\\n'`, and wrote `" in report
    for stage in ("pretraining", "supervised", "grpo", "grpo-q8_0.gguf"):
        assert f"| {stage} | " in report
    assert (tmp_path / "reverse" / "report.png").stat().st_size > 10_000
