"""Reward functions in processes: what fails costs one reward, and no process stays."""

import math
import os
import pathlib
import re
import time

import pytest

from tests.rl.test_rollouts import make
from tests.support.refusals import (
    config_error,
    data_error,
    process_error,
    value_error,
)
from zjax import rl
from zjax.rl import reward_process, reward_worker
from zjax.rl.reward_process import RewardProcess
from zjax.rl.rewards import add_scores, function_name
from zjax.rl.tasks import sums

JUDGES = """
import os, re, subprocess, sys, time

def judge(prompt, completion, *, do="", **row):
    print("noise")
    match do:
        case "": return len(prompt) + len(completion) / 10
        case "raise": raise KeyError("no answer\\nat all")
        case "exit": sys.exit("done")
        case "end": os._exit(3)
        case "fault": os.kill(os.getpid(), 11)
        case "hang": time.sleep(60)
        case "hold": re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
        case "children":
            child = subprocess.Popen(["sleep", "60"])
            open(row["path"], "w").write(str(child.pid))
            child.wait()
        case "value": return eval(row["value"])

def count(prompt, completion, *, path, **row):
    with open(path, "a") as file:
        file.write("x")

def one(prompt, completion, **row):
    return 1

def always(prompt, completion, **row):
    raise ValueError("never")

constant = 3
"""
JUDGE = "judges:judge"


@pytest.fixture(autouse=True)
def judges(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "ends.py").write_text("import os; os._exit(0)")
    monkeypatch.syspath_prepend(tmp_path)


def does(*given, prompt=0):
    """A rollout for each thing that a judge does."""
    rows = [x if isinstance(x, dict) else {"do": x} for x in given]
    return [make(prompt, n, row=row, rewards={"a": 2.0}) for n, row in enumerate(rows)]


def values(*given):
    return does(*({"do": "value", "value": x} for x in given))


def pool(*names, num=1, seconds=20.0):
    return rl.RewardPool(names or [JUDGE], num_processes=num, seconds=seconds)


def found(rollouts, name=JUDGE):
    return [x.rewards[name] for x in rollouts]


def alive(pid):
    """Whether a process runs; a zombie has ended."""
    try:
        return " Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_rewards_come_in_order_from_all_processes(capfd):
    rollouts = [make(0, n, text="x" * n, rewards={"a": 2.0}) for n in range(20)]
    with pool(JUDGE, "judges:count", num=3) as judges:
        rows = [{"path": os.devnull}] * 20
        rollouts = [make(0, n, text="x" * n, row=row) for n, row in enumerate(rows)]
        scored = judges.score(iter(rollouts))
        pids = [each._process.pid for each in judges._processes]
    assert found(scored) == [len("2 + 2 =") + n / 10 for n in range(20)]
    assert found(scored, "judges:count") == [None] * 20
    assert [x.sample for x in scored] == [*range(20)]
    assert {**scored[0].rewards}.keys() == {"exact", "short", JUDGE, "judges:count"}
    assert rollouts[0].rewards.keys() == {"exact", "short"}
    assert not any(map(alive, pids))
    assert "noise" not in capfd.readouterr().out


def test_numbers_are_rewards_and_none_is_no_failure():
    given = "1", "True", "-0.5", "__import__('fractions').Fraction(1, 4)", "None"
    with pool() as judges:
        scored = judges.score(values(*given))
        assert found(scored) == [1.0, 1.0, -0.5, 0.25, None]
        assert judges.failures == {JUDGE: 0}
        # No reward at all is no failure.
        assert found(judges.score(values("None"))) == [None]


FAILURES = {
    "raise": "KeyError: 'no answer\\nat all'",
    "exit": "SystemExit: done",
    "end": "ended the process by exit code 3",
    "fault": "ended the process by signal 11, SIGSEGV",
    "hang": "took more than 1 s",
    "'1'": "returned '1', which is no number",
    "[1]": "returned [1], which is no number",
    "1j": "returned 1j, which is no number",
    "float('nan')": "returned nan, which is not finite",
    "-float('inf')": "returned -inf, which is not finite",
    "-1.5e9": "returned -1500000000.0, beyond 1e+09",
    "__import__('os').write(int(__import__('sys').argv[1]), b'\\0\\0\\0\\5hello')": (
        "wrote what is no answer to the connection"
    ),
    "10**400": "returned 1" + "0" * 299 + ", which is no number",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_costs_one_reward_and_is_told(failure, caplog):
    known = ("raise", "exit", "end", "fault", "hang")
    [bad] = does(failure) if failure in known else values(failure)
    good = make(0, 1, row={}, rewards={"a": 2.0})
    # A slow machine takes its time for what does not hang.
    with pool(seconds=1.0 if failure == "hang" else 20.0) as judges:
        scored = judges.score([good, bad, make(0, 2, row={})])
        assert judges.failures == {JUDGE: 1}
    assert found(scored) == [7.1, None, 7.1]
    reason = FAILURES[failure]
    [told] = [x.message for x in caplog.records]
    assert told == (
        f"reward {JUDGE} failed for prompt 0 ('2 + 2 ='), sample 0: {reason}"
    )


class Silent(Exception):
    """A number and an exception that cannot be shown."""

    def __init__(self, number):
        self.number = number

    def __float__(self):
        return 1.0 / self.number

    def __repr__(self):
        raise RuntimeError

    __str__ = __repr__


def test_what_cannot_be_shown_is_a_reward_or_one_failure():
    def raises(prompt, completion):
        raise Silent(0)

    def returns(prompt, completion):
        return Silent(int(completion))

    assert reward_worker.call(returns, "", "2", {}) == (0.5, "")
    text = "returned <Silent>, which is no number"
    assert reward_worker.call(returns, "", "0", {}) == (None, text)
    assert reward_worker.call(raises, "", "", {}) == (None, "Silent: <Silent>")


def test_answers_that_others_wrote_are_checked():
    read = reward_worker.read_answer
    assert read([0.5, ""]) == (0.5, "") and read([None, ""]) == (None, "")
    assert read([None, "why"]) == (None, "why")
    assert read([math.nan, ""]) == (None, "returned nan, which is not finite")
    assert read(["1", ""]) == (None, "returned '1', which is no number")
    for given in (1.0, [1.0], [1.0, "why"], [None, 1], {"reward": 1}):
        with value_error("is no answer"):
            read(given)


def test_a_completion_that_one_function_fails_has_no_reward_by_any():
    """Fails if rewards by the other functions alone judge the completion."""
    names = JUDGE, "judges:one"
    with pool(*names) as judges:
        first, second = judges.score(does("", "raise"))
    assert first.rewards == {"a": 2.0, JUDGE: 7.1, "judges:one": 1.0}
    assert second.rewards["a"] is None
    assert second.total(dict.fromkeys(names, 1.0)) is None


def test_the_first_failures_are_told_and_the_rest_counted(caplog):
    with pool() as judges:
        judges.score(does(*["raise"] * 5, ""))
    told = [x.message for x in caplog.records]
    assert [int(re.findall(r"sample (\d)", x)[0]) for x in told[:3]] == [0, 1, 2]
    assert told[3:] == [f"reward {JUDGE} failed for 2 more"]


def test_a_function_that_always_fails_stops_the_run():
    with pool(JUDGE, "judges:always") as judges:
        with data_error(
            "rewards='judges:always' failed for all 2 completions (ValueError: never); "
            "mend it"
        ):
            judges.score(does("", ""))


def test_a_call_that_hangs_ends_with_its_children(tmp_path):
    path = tmp_path / "pid"
    row = {"do": "children", "path": str(path)}
    start = time.monotonic()
    with pool(seconds=1.0) as judges:
        scored = judges.score(does("hold", row, ""))
        assert found(scored) == [None, None, 7.1]
    assert time.monotonic() - start < 20
    wait_until(lambda: not alive(int(path.read_text())))


@pytest.mark.parametrize("task", ["", "hold"], ids=["idle", "busy"])
def test_a_process_ends_after_the_program_that_counts_the_time(task, monkeypatch):
    """Fails if processes outlive a run that was killed."""
    monkeypatch.setattr(reward_process, "SECONDS_MORE", 0.2)
    process = RewardProcess([JUDGE], 0.3)
    assert process.receive() is None
    program = process._process
    if task:
        process.call((0, 0), (0, "", "", {"do": task}))
        assert program.wait(20) == 1
    else:
        process.connection.close()
        assert program.wait(20) == 0


def test_a_pool_that_nobody_closes_ends():
    judges = pool()
    pids = [each._process.pid for each in judges._processes]
    assert all(map(alive, pids))
    del judges
    wait_until(lambda: not any(map(alive, pids)))


def test_rollouts_are_read_as_processes_become_free(tmp_path):
    """Fails if all completions are waited for before the first is scored."""
    path = tmp_path / "calls"

    path.touch()

    def draw():
        for number in range(8):
            # One is in work, and one waits for a process.
            wait_until(lambda least=number - 2: path.stat().st_size >= least)
            assert path.stat().st_size <= number
            yield make(0, number, row={"path": str(path)})

    with pool("judges:count") as judges:
        assert len(judges.score(draw())) == 8


def test_answers_of_a_step_that_was_left_are_not_those_of_the_next():
    def draw():
        yield from values("__import__('time').sleep(0.3) or 11.0")
        raise InterruptedError

    with pool(num=2) as judges:
        with pytest.raises(InterruptedError):
            judges.score(draw())
        assert found(judges.score(values("1.0", "2.0", "3.0"))) == [1, 2, 3]


def test_what_cannot_be_called_is_refused_at_the_start():
    with config_error(
        "rewards='broken:judge' cannot be imported (ModuleNotFoundError: No module "
        "named 'no_such_module'); run where Python finds it, or mend it\n"
        "rewards='judges:nothing' names no function; run where Python finds it, or "
        "mend it\n"
        "rewards='judges:constant' names no function; run where Python finds it, or "
        "mend it"
    ):
        pool(JUDGE, "broken:judge", "judges:nothing", "judges:constant")
    with config_error(
        "rewards='judges.judge' is not the name of a function; use module:function\n"
        "rewards='judges:judge' is named twice; name it once\n"
        "rewards='judges:judge' is named twice; name it once\n"
        "num_processes=0 is below 1; use 1 or more\n"
        "seconds=nan is not a number above 0; use 10.0"
    ):
        pool("judges.judge", JUDGE, JUDGE, num=0, seconds=math.nan)
    with config_error("rewards=[] names no function; name one or more"):
        rl.RewardPool([])
    with process_error(
        "rewards=['ends:judge'] could not be imported within 120 s, or ended the "
        "process; import fewer and smaller modules"
    ):
        pool("ends:judge")


def test_functions_have_names_that_a_process_can_import():
    assert function_name(sums.reward) == "zjax.rl.tasks.sums:reward"

    def local():
        pass

    def of_program():
        pass

    of_program.__module__, of_program.__qualname__ = "__main__", "f"
    here = "tests.rl.test_rewards:test_functions_have_names_that_a_process_can_import"
    names = f"{here}.<locals>.local", "__main__:f", "None:str.join"
    for function, name in zip((local, of_program, "".join), names, strict=True):
        with config_error(
            f"rewards='{name}' is at the top of no module, which a process imports; "
            "define it with `def` in a file, and import it"
        ):
            function_name(function)


class Lengths:
    def __init__(self, *scores):
        self.scores = scores

    def score(self, rollouts):
        return [*self.scores] or [float(len(x.ids)) for x in rollouts]


def test_a_model_may_be_the_judge():
    rollouts = does("", "")
    scored = add_scores(rollouts, "length", Lengths())
    assert [{**x.rewards} for x in scored] == [{"a": 2.0, "length": 2.0}] * 2
    with data_error("scores of length=1 are not 2, one for each rollout; return all"):
        add_scores(rollouts, "length", Lengths(1.0))
    with data_error("rewards.length=nan is not finite; use None"):
        add_scores(rollouts, "length", Lengths(1.0, math.nan))
