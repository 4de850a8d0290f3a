"""Commands that read checkpoints, and what they read besides."""

import numpy as np
import pytest
from absl import flags

from tests.checkpoint import states
from zjax.checkpoint.store import Store
from zjax.commands import read_prompts, rewind
from zjax.errors import ConfigError
from zjax.main import define_flags
from zjax.reading import MAX_TEXT_BYTES


@pytest.fixture(autouse=True)
def parsed():
    if "prompt" not in flags.FLAGS:
        define_flags(["zjax"])
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["zjax"])


def test_rewind_names_what_it_sets_aside(tmp_path, monkeypatch, capsys):
    """Fails if a run goes on from a later step than the chosen one."""
    rows = states.make_rows({"w": np.zeros(3, np.float32)})
    store = Store(str(tmp_path / "checkpoints"))
    for number in (1, 2):
        store.save(number, states.place({"w": np.ones(3)}, rows), rows, extra={})
    store.close()
    monkeypatch.setattr(flags.FLAGS["run"], "value", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        rewind()
    assert str(error.value) == (
        "--step='latest' is where a run goes on already; use best or a number"
    )
    monkeypatch.setattr(flags.FLAGS["step"], "value", "1")
    rewind()
    assert capsys.readouterr().out == (
        f"set aside: {tmp_path}/checkpoints/set-aside-2\n"
        "`zjax train` goes on from step 1; remove what you do not need\n"
    )
    assert Store(str(tmp_path / "checkpoints")).latest() == 1


def test_prompts_are_the_lines_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(" def f(\nimport\n")
    assert read_prompts(str(path)) == [" def f(", "import"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no prompt on line 1; write one, or remove it"),
        (b"a\n \nb\n", "has no prompt on line 2; write one, or remove it"),
        (
            b"\xff",
            "cannot be read (it is not UTF-8 text); give a text with a prompt a line",
        ),
        (
            b"a" * (MAX_TEXT_BYTES + 1),
            "cannot be read (it has more than 1,048,576 bytes); "
            "give a text with a prompt a line",
        ),
    ],
    ids=["empty", "blank-line", "bytes", "large"],
)
def test_a_file_that_holds_no_prompts(content, problem, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_prompts(str(path))
    assert str(error.value) == f"--file='{path}' {problem}"
