"""Completion, by the shell itself."""

import shutil
import subprocess

import pytest

from zjax.cli.main import COMMANDS
from zjax.cli.usage import completion_script


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tr", "train"),
        ("data a", "analyze"),
        ("train --ds", "--ds_config="),
        ("generate --top", "--top_k= --top_p="),
        ("generate --top_k=3 --see", "--seed="),
        ("train --config.zero.sta", "--config.zero.stage="),
        ("data prepare --val", "--validation_fraction="),
        ("report --config", ""),
    ],
)
def test_bash_completes(typed, completed):
    words = ["zjax", *typed.split()]
    script = completion_script("bash", COMMANDS)
    quoted = " ".join(f"'{word}'" for word in words)
    script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _zjax\n"
    script += 'echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


def test_zsh_reads_the_script_of_bash():
    script = completion_script("zsh", COMMANDS)
    assert script.startswith("autoload -U +X compinit bashcompinit")
    assert script.endswith(completion_script("bash", COMMANDS))
