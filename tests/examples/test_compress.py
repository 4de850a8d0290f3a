"""The example of compression: its settings and commands, its measure, a tiny run."""

import pytest

import zjax
from tests.support.benchmarks import ROOT
from tests.support.command_line import typed
from tests.support.neighbours import importing, run
from zjax.checkpoint.export import export_huggingface
from zjax.cli.commands import check_layout
from zjax.cli.compressing import read_recipe
from zjax.config import check_config

FOLDER = ROOT / "examples" / "compress"
TINY = (
    "num_steps=2",
    "model.num_layers=2",
    "model.embed_size=128",
    "model.mlp_size=128",
    "model.num_heads=2",
    "model.max_length=16",
    "optimizer.schedule.num_warmup_steps=1",
    "evaluation.num_batches=1",
)


@pytest.fixture
def example():
    with importing(FOLDER) as load:
        yield load("run")


def test_runs_and_commands_can_work(example):
    """Fails if a setting, a recipe or a layout was renamed."""
    runs = example.runs_of("runs/compress/large", num_layers=4, further_steps=3)
    for own in runs.values():
        check_config(zjax.load_config(example.MODEL, *own), num_devices=1)
    for run_name, command in example.FILES.values():
        name, *words = command.split()
        given = typed(name, *words)
        assert run_name in runs
        if name == "export":
            check_layout(given.format, given.quantize)
        else:
            assert read_recipe(given.recipe)


def test_weights_are_measured_as_they_are_read_back(example, tmp_path):
    """Fails if other weights are measured, or a server's activations are not."""
    changes = "model.num_layers=1", f"directory={tmp_path / 'large'}"
    config = zjax.load_config(example.MODEL, *TINY, *changes)
    trainer = zjax.Trainer(config)
    trainer.save()
    trainer.close()
    path, rounded = tmp_path / "plain", tmp_path / "plain-w8a8"
    export_huggingface(trainer.store, str(path))
    rounded.symlink_to(path)
    expected = trainer.evaluate()["eval_loss"]
    loss, tokens = example.measure(path, config)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert tokens.shape == (config.global_batch_size, config.model.max_length)
    assert loss != example.measure(rounded, config)[0] == pytest.approx(loss, abs=0.01)
    assert example.size_of(path) == (path / "model.safetensors").stat().st_size


def test_a_row_of_each_file_is_shown_and_drawn(example, tmp_path, capsys):
    table = {name: (1_500, 2.0, 0.5) for name in example.FILES}
    example.show(table)
    example.draw(table, tmp_path / "picture.png")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split() for line in lines] == [
        [name, "2", "2.0000", "50.0%"] for name in example.FILES
    ]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_example_runs_from_training_to_text(example, tmp_path):
    path = FOLDER / "run.py"
    out = run(path, f"--directory={tmp_path}", "--further_steps=2", *TINY, seconds=900)
    lines = out.splitlines()
    for name in example.FILES:
        [row] = [line.split() for line in lines if line.split()[:1] == [name]]
        assert float(row[2]) < 7
    assert (tmp_path / "size_and_loss.png").stat().st_size > 10_000
    assert any(line.startswith("import ") for line in lines)
