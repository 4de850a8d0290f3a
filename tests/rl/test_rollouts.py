"""Rollouts and their file: what is read is what was written, or an error says why."""

import dataclasses
import json
import re

import numpy as np
import pytest

from zjax import rl
from zjax.errors import DataError

ARRAYS = "prompt_ids", "ids", "logprobs", "experts"
SAMPLING = {"temperature": 0.7, "top_k": 0, "forbidden_ids": (), "seed": 3}


def make(prompt=0, sample=0, **changes):
    given = {
        "given": "2 + 2 =",
        "prompt_ids": [5, 6, 7],
        "ids": [8, 1],
        "logprobs": np.float32([-0.1, -1e-7]),
        "finish_reason": "stop",
        "text": "4",
        "step": 12,
        "row": {"answer": 4, "tags": ["a\u2028", "\ud800"]},
        "rewards": {"exact": 1.0, "short": None},
        "sampling": SAMPLING,
    }
    return rl.Rollout(prompt=prompt, sample=sample, **given | changes)


def make_all():
    experts = np.arange(4 * 2 * 2).reshape(4, 2, 2)
    chat = [{"role": "user", "content": "Wieso?"}]
    return [
        make(),
        make(0, 1, experts=experts.astype(np.int16), text="vier"),
        make(1, 0, given=chat, experts=experts.astype(np.uint8)),
    ]


def same(one, other):
    """Whether all fields are equal, of equal dtypes; JSON has no tuples."""
    for field in dataclasses.fields(rl.Rollout):
        x, y = getattr(one, field.name), getattr(other, field.name)
        if field.name in ARRAYS and x is not None:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert json.dumps(x) == json.dumps(y)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.jsonl"


def refused(path, problem):
    return pytest.raises(
        DataError,
        match=re.escape(f"rollouts={str(path)!r} {problem}") + "$",
    )


def test_a_file_gives_back_every_field(path):
    rollouts = make_all()
    checksum = rl.write_rollouts(path, rollouts)
    found = rl.read_rollouts(path, checksum)
    assert len(found) == 3
    for one, other in zip(rollouts, found, strict=True):
        same(one, other)
    # Each line is JSON, with the numbers that a reader needs in plain sight.
    line = json.loads(path.read_text().splitlines()[2])
    assert line["ids"] == [8, 1] and line["row"]["answer"] == 4
    assert rl.read_rollouts(path)[0].temperature == 0.7


def test_rewards_are_summed_by_weight():
    rollout = make(rewards={"a": 1.0, "b": None, "c": -0.5})
    assert rollout.total({"a": 2.0, "b": 5.0, "c": 1.0}) is None
    assert rollout.total({"a": 2.0, "c": 1.0}) == 1.5
    assert rollout.total({"b": 1.0}) is None
    assert rollout.total({"a": 0.0}) == 0.0


def _flip(content):
    place = content.index(b'"ids": [8') + len(b'"ids": [')
    return content[:place] + b"9" + content[place + 1 :]


def _swap(content):
    first, second, third = content.splitlines(keepends=True)
    return second + first + third


def _drop(content):
    first, _, third = content.splitlines(keepends=True)
    return first + third


MISMATCH = "does not match the checksum of all lines so far in line {}"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_flip, MISMATCH.format(1)),
        (_swap, MISMATCH.format(1)),
        (_drop, MISMATCH.format(2)),
        (lambda x: x[:-1], "is cut off in line 3"),
        (lambda x: x[:-40], "is cut off in line 3"),
        (lambda x: x + b"\n", MISMATCH.format(4)),
        (lambda x: x + b'{"prompt": 0}\n', MISMATCH.format(4)),
    ],
    ids=["changed", "moved", "lost", "newline", "half", "blank", "foreign"],
)
def test_a_damaged_file_is_refused(damage, problem, path):
    rl.write_rollouts(path, make_all())
    path.write_bytes(damage(path.read_bytes()))
    with refused(path, f"{problem}; write the file again"):
        rl.read_rollouts(path)


def test_lines_that_are_missing_at_the_end_are_told_by_the_checksum(path):
    checksum = rl.write_rollouts(path, make_all())
    shorter = rl.write_rollouts(path, make_all()[:2])
    problem = f"has checksum {shorter}, not {checksum}: lines are missing"
    with refused(path, f"{problem}; write the file again"):
        rl.read_rollouts(path, checksum)
    assert rl.write_rollouts(path, []) == "00000000"
    assert rl.read_rollouts(path, "00000000") == []


def test_a_missing_file_and_a_second_copy_are_refused(path):
    with refused(path, "does not exist; check the path"):
        rl.read_rollouts(path)
    rl.write_rollouts(path, [make(), make(0, 1), make()])
    problem = "has sample 0 of prompt 0 a second time in line 3; write the file again"
    with refused(path, problem):
        rl.read_rollouts(path)


def test_a_line_is_read_within_a_bound(path, monkeypatch):
    rl.write_rollouts(path, make_all())
    monkeypatch.setattr("zjax.rl.rollouts.MAX_LINE_BYTES", 100)
    problem = "has more than 100 bytes in line 1; write the file again"
    with refused(path, problem):
        rl.read_rollouts(path)


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (float("nan"), "Out of range float values are not JSON compliant"),
        ({1}, "Object of type set is not JSON serializable"),
    ],
)
def test_what_is_no_json_costs_no_file(stop, why, path):
    """Fails if a rollout that cannot be written replaces rollouts that could."""
    rl.write_rollouts(path, make_all())
    before = path.read_bytes()
    with pytest.raises(DataError, match=f"rollout 7=2 is no JSON .{why}"):
        rl.write_rollouts(path, [make(), make(7, 2, sampling={"stop": stop})])
    assert path.read_bytes() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]


FILTERED = "draws from a filtered distribution, which training does not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ids": [8, 1, 2]},
            "logprobs='...' has 2 numbers for 3 tokens; give one for each token of "
            "`ids`",
        ),
        (
            {"ids": [], "logprobs": []},
            "ids=[] is float64[0], and not int32[n]; give one number for each token\n"
            "logprobs=[] is float64[0], and not float32[n]; give one number for each "
            "token",
        ),
        (
            {"ids": [8, 1 << 32]},
            "ids=[8, 4294967296] holds 4294967296 at place 1; give ids of 0 to "
            "2^31 - 1",
        ),
        (
            {"prompt_ids": [-1]},
            "prompt_ids=[-1] holds -1 at place 0; give ids of 0 to 2^31 - 1",
        ),
        (
            {"logprobs": [-1.0, float("-inf")]},
            "logprobs=[-1.0, -inf] holds -inf at place 1; give finite numbers",
        ),
        (
            {"finish_reason": "eos"},
            "finish_reason='eos' is unknown; use one of stop, length, abort",
        ),
        ({"step": -1}, "step=-1 is no number of 0 or more; use 0 or more"),
        (
            {"rewards": {"exact": float("nan")}},
            "rewards.exact=nan is not finite; use None",
        ),
        (
            {"row": {"completion": "4"}},
            "row='...' has the field 'completion', an argument of rewards; name the "
            "field otherwise, or make it JSON",
        ),
        (
            {"row": {"answer": 1j}},
            "row='...' has a value that is no JSON (Object of type complex is not JSON "
            "serializable); name the field otherwise, or make it JSON",
        ),
        (
            {"sampling": {"top_p": 0.9, "forbidden_ids": [3], "temperature": 0}},
            f"top_p=0.9 {FILTERED}; use 1.0\n"
            f"forbidden_ids=[3] {FILTERED}; use ()\n"
            "temperature=0.0 draws nothing, so that tokens have no probability to "
            "learn from; use 1.0",
        ),
        (
            {"experts": np.zeros((3, 1, 2), np.int64)},
            "experts='...' has the shape (3, 1, 2), and 4 tokens were read; give "
            "[tokens, MoE layers, experts of a token]\n"
            "experts='...' is of int64; use uint8 or int16",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_no_rollout_is_refused(changes, message):
    with pytest.raises(DataError) as caught:
        make(**changes)
    assert str(caught.value) == message
