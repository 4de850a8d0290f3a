"""The page of the package: its program runs, and its table names what exists."""

import pathlib
import re

import numpy as np

from zjax import rl

PAGE = (pathlib.Path(__file__).parents[2] / "docs/reference/rl.md").read_text()
CALLED = re.compile(r"`(\w+)[(`]|(\w+)\(")


def test_the_program_runs():
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    names = {}
    exec(program, names)
    # Equal policies: minus the mean advantage of a token; more of the better sample.
    advantage = 0.5**0.5
    np.testing.assert_allclose(names["loss"], -advantage * 2 / 4, rtol=1e-3)
    expected = advantage / 4 * np.array([[-1, -1, -1], [1, 0, 0]])
    np.testing.assert_allclose(names["gradient"], expected, rtol=1e-3)


def test_the_table_names_functions_and_settings():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    names = {x or y for row in rows for x, y in CALLED.findall(row)}
    assert names <= {*rl.__all__}
    assert names >= {"clip_loss", "rloo_advantages", "discounted_returns"}


def test_every_function_is_on_the_page():
    assert {*re.findall(r"^::: zjax\.rl\.(\w+)$", PAGE, re.M)} == {*rl.__all__}
