"""`zjax rl` from a config file to a run that other commands read."""

import json

import pytest

from tests.support import rl_run
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax.cli import commands, reinforcing


@pytest.fixture
def words(tmp_path):
    """The command line of a run of one step."""
    settings = rl_run.SETTINGS | {"directory": str(tmp_path / "run"), "num_steps": 1}
    settings["observe"] = settings["observe"] | {"plot": True}
    path = tmp_path / "settings.py"
    path.write_text(f"def get_config():\n    return {settings!r}\n")
    return [f"--config={path}"]


def test_a_run_learns_and_other_commands_read_it(words, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rl_run.PROMPTS))
    reinforcing.learn(typed("rl", *words, f"--config.rl.prompts={prompts}"))
    told = capsys.readouterr().out
    text = "rollouts: 2 of 3 prompts x 4 texts of up to 6 tokens, 1 step on each"
    assert text in told
    assert "done at step 1" in told
    assert (tmp_path / "run" / "rewards.png").is_file()
    given = typed("evaluate", f"--run={tmp_path / 'run'}")
    trainer, part = commands.restored(commands.settings(given), given)
    assert (trainer.step, part) == (1, "raw")
    trainer.close()


def test_a_run_without_prompts_is_refused(words):
    text = "rl.prompts='' names no prompts; give a file of JSON Lines"
    with config_error(text):
        reinforcing.learn(typed("rl", *words))
