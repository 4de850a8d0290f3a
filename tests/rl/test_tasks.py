"""Tasks: traces are right, held-out operands are new, and verifiers are strict."""

import inspect
import re

import pytest

from tests.support.refusals import config_error
from zjax.rl import tasks
from zjax.rl.tasks import countdown, reverse, sums
from zjax.rl.tasks.operands import held_out_operands

TASKS = [getattr(tasks, name) for name in tasks.__all__]
each_task = pytest.mark.parametrize("task", TASKS, ids=tasks.__all__)


@each_task
@pytest.mark.parametrize("level", [1, 2, 3])
def test_traces_are_rewarded_and_other_answers_are_not(task, level):
    rows = task.rows(30, seed=1, level=level)
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        for working in (True, False):
            completion = task.trace(row, working=working)
            assert task.reward(completion=completion, **row) == 1.0
        assert len(completion.splitlines()) == 1
        assert task.reward(completion=completion + "\n", **row) == 1.0
        assert task.reward(completion=completion[:-1], **row) == 0.0
        assert task.reward(completion="", **row) == 0.0
        if row["operands"] != other["operands"]:
            assert task.reward(completion=task.trace(other), **row) == 0.0


@each_task
def test_rows_are_a_function_of_the_seed(task):
    rows = task.rows(40, seed=5)
    assert task.rows(40, seed=5) == rows
    assert task.rows(10, seed=5) == rows[:10]
    assert task.rows(40, seed=6) != rows
    assert {len(row["operands"]) for row in task.rows(4, level=4)} == {5}


@each_task
def test_pairs_of_held_out_operands_occur_in_no_other_row(task):
    """Fails if a model could have seen two operands that are to be new together."""
    operands = inspect.signature(task.rows).parameters["operands"].default
    new = held_out_operands(operands)
    assert 0.08 < len(new) / len(operands) < 0.12
    held_out = task.rows(200, level=2, held_out=True)
    assert all(x in new for row in held_out for x in row["operands"])
    counts = [sum(x in new for x in row["operands"]) for row in task.rows(400, level=2)]
    assert {*counts} == {0, 1}


@each_task
def test_levels_and_ranges_that_make_no_task_are_refused(task):
    with config_error(
        "level=0 is below 1; use 1 or more\n"
        "operands=range(1, 20) has 19 operands, of which none is held out; use 20 or "
        "more"
    ):
        task.rows(1, level=0, operands=range(1, 20))


@pytest.mark.parametrize(
    "answer",
    [
        "(7*3)+4",
        "3*7 + 4",
        "4 - (3 * (1 - 8))",
        "4*7-3",
        "5*5*1",
        "25",
        "3*7+4-0",
        "(3*7)4",
        "3**7*4",
        "3*7+4=25",
        "__import__('os')",
        "7/0+3+4",
        "-3*-7+4",
        "3*7+4;1",
        "(" * 101 + "3*7+4" + ")" * 101,
    ],
)
def test_countdown_takes_expressions_of_the_numbers_alone(answer):
    right = answer in ("(7*3)+4", "3*7 + 4", "4*7-3")
    found = countdown.reward("", answer, operands=[3, 7, 4], target=25)
    assert found == float(right)


def test_fractions_are_exact():
    assert countdown.reward("", "8/(3-8/3)", operands=[8, 3, 8, 3], target=24) == 1.0
    assert countdown.reward("", "1/3*3", operands=[1, 3, 3], target=1) == 1.0


def test_a_search_stops_at_the_first_solution():
    """Fails if a trace goes on behind the solution, or names it without finding it."""
    for row in countdown.rows(40, level=2):
        *tried, last, _ = countdown.trace(row).splitlines()
        assert int(last.rpartition("=")[2]) == row["target"]
        assert len(tried) < 9 * 4
        for line in [*tried, last]:
            given, result = line.split("=")
            assert eval(given) == int(result)


def test_each_line_of_working_is_true():
    [row] = sums.rows(1, level=3)
    *lines, answer = sums.trace(row).splitlines()
    assert len(lines) == 3 and lines[-1].endswith(f"={answer}")
    [row] = reverse.rows(1, level=3)
    *lines, answer = reverse.trace(row).splitlines()
    pairs = [line.split(">") for line in lines]
    assert all(x == y[::-1] for x, y in pairs)
    assert " ".join(y for _, y in pairs) == answer
    assert re.fullmatch(r"[a-z]{3}( [a-z]{3}){3}\n", row["prompt"])
