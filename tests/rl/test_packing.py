"""Rollouts in rows: every token once, nothing split, nothing of another text."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import policies
from zjax import rl
from zjax.errors import ConfigError, DataError

ROLLOUTS = policies.make_rollouts()
ADVANTAGES = [float(x) for x in range(1, 1 + len(ROLLOUTS))]


def packed(**settings):
    return rl.pack(ROLLOUTS, ADVANTAGES, **{"length": 16, "num_rows": 6} | settings)


def test_every_text_lies_whole_in_a_row_of_its_segment():
    found = packed()
    batch = found.batch
    assert found.num_tokens == sum(map(sum, policies.SHAPES))
    for rollout, (row, span) in zip(ROLLOUTS, found.places, strict=True):
        start = span.start - len(rollout.prompt_ids) + 1
        whole = slice(start, span.stop + 1)
        text = [*rollout.prompt_ids, *rollout.ids]
        assert batch["tokens"][row, whole].tolist() == text
        assert batch["positions"][row, whole].tolist() == [*range(len(text))]
        (number,) = {*batch["segment_ids"][row, whole].tolist()}
        assert (batch["segment_ids"][row] == number).sum() == len(text)
        # Trap 5: prompts have no loss, and the last token has.
        assert batch["targets"][row, span].tolist() == rollout.ids.tolist()
        assert (batch["targets"][row, start : span.start] == -100).all()
        assert batch["targets"][row, span.stop] == -100


def test_values_come_back_in_order():
    found = packed()
    for name in ("logprobs", "advantages"):
        for i, x in enumerate(found.unpack(found.batch["rl"][name])):
            expected = ROLLOUTS[i].logprobs if name == "logprobs" else ADVANTAGES[i]
            np.testing.assert_array_equal(x, np.broadcast_to(expected, len(x)))
    values = policies.make_values(1)
    again = found.with_arrays(old_logprobs=values)
    for x, y in zip(
        again.unpack(again.batch["rl"]["old_logprobs"]), values, strict=True
    ):
        np.testing.assert_array_equal(x, y)
    # An array of packed tokens stays as it is.
    array = again.batch["rl"]["old_logprobs"]
    assert found.with_arrays(x=array).batch["rl"]["x"] is array
    assert "x" not in found.batch["rl"]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", rl.token_mean),
        ("sequence_mean", rl.sequence_mean),
        ("constant_mean", lambda x, mask: rl.constant_mean(x, mask, length=12)),
    ],
)
def test_weights_are_the_aggregation(aggregation, expected):
    constant = 12 if aggregation == "constant_mean" else 0
    batch = packed(aggregation=aggregation, constant=constant).batch
    losses = np.random.default_rng(0).normal(size=(len(ROLLOUTS), 12))
    mask = np.arange(12) < np.array(policies.SHAPES)[:, 1:]
    spread = (
        packed().with_arrays(x=[x[m] for x, m in zip(losses, mask, strict=True)]).batch
    )
    total = (spread["rl"]["x"] * batch["weights"]).sum()
    found = total / batch["rl"]["units"].sum()
    np.testing.assert_allclose(
        found, expected(jnp.asarray(losses), jnp.asarray(mask)).mean, rtol=1e-5
    )


def test_the_smallest_number_of_rows_that_suffices():
    assert packed(num_rows=(12, 6, 4)).batch["tokens"].shape == (6, 16)
    assert packed(num_rows=[3, 9]).batch["tokens"].shape == (9, 16)
    # As many rows as texts without sharing, the longest first.
    alone = packed(shares_rows=False, num_rows=9)
    assert sorted(row for row, _ in alone.places) == [*range(9)]


def test_missing_rewards_and_empty_texts_are_left_out():
    """Trap 2: no row, no weight, and values of no token."""
    empty = types.SimpleNamespace(
        prompt_ids=[1],
        ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        experts=None,
    )
    advantages = [1.0, np.nan, 1.0]
    found = rl.pack([*ROLLOUTS[:2], empty], advantages, length=16, num_rows=1)
    assert found.places[1:] == (None, None)
    assert found.num_tokens == sum(policies.SHAPES[0])
    assert found.batch["weights"].sum() == policies.SHAPES[0][1]
    values = found.unpack(found.batch["rl"]["logprobs"])
    assert [len(x) for x in values] == [policies.SHAPES[0][1], 0, 0]


def test_advantages_of_tokens():
    advantages = [np.arange(n, dtype=np.float32) for _, n in policies.SHAPES]
    found = rl.pack(ROLLOUTS, advantages, length=16, num_rows=6)
    for x, y in zip(
        found.unpack(found.batch["rl"]["advantages"]), advantages, strict=True
    ):
        np.testing.assert_array_equal(x, y)


REFUSED = [
    (
        {"length": 12},
        DataError,
        "rollouts[3]=16 tokens are more than the length=12 of a row; raise the length\n"
        "rollouts[5]=13 tokens are more than the length=12 of a row; raise the length",
    ),
    (
        {"num_rows": [3, 2]},
        DataError,
        "num_rows=3 is less than the 5 rows that 79 tokens need; raise it, or give "
        "fewer rollouts",
    ),
    (
        {"num_rows": 0, "constant": 3},
        ConfigError,
        "num_rows=0 is below 1; give the rows of a step\n"
        "constant=3 is not read by aggregation='token_mean'; leave it out",
    ),
    (
        {"aggregation": "constant_mean"},
        ConfigError,
        "constant=0 is below 1; use the limit of generated tokens",
    ),
]


@pytest.mark.parametrize(("settings", "kind", "text"), REFUSED)
def test_settings_that_cannot_work(settings, kind, text):
    with pytest.raises(kind) as error:
        packed(**settings)
    assert str(error.value) == text


def test_arrays_that_do_not_fit_are_refused():
    odd = types.SimpleNamespace(
        prompt_ids=[],
        ids=np.array([1, 2]),
        logprobs=np.zeros(1, np.float32),
        experts=None,
    )
    with pytest.raises(DataError) as error:
        rl.pack([odd], [1.0], length=16, num_rows=1)
    assert str(error.value) == (
        "rollouts[0].prompt_ids=[] is empty; begin the prompt with a token\n"
        "len(rollouts[0].logprobs)=1 is not the 2 of the tokens; give the "
        "log-probability of each token as it was drawn"
    )
    with pytest.raises(DataError) as error:
        rl.pack(ROLLOUTS[:1], [np.zeros(2)], length=16, num_rows=1)
    assert str(error.value) == (
        "advantages[0]=(2,) is not of the 5 tokens of the completion; give a number, "
        "or one for each token"
    )
    with pytest.raises(DataError) as error:
        rl.pack(ROLLOUTS, [1.0], length=16, num_rows=1)
    assert str(error.value) == (
        "len(advantages)=1 is not the 9 of the rollouts; give one each"
    )
    found = packed()
    with pytest.raises(DataError) as error:
        found.with_arrays(values=[np.zeros(3)] * 9)
    assert str(error.value).splitlines()[0] == (
        "values[0]=(3,) is not of 5 tokens; give a value for each"
    )
    with pytest.raises(DataError) as error:
        found.with_arrays(values=[])
    assert (
        str(error.value) == "len(values)=0 is not the 9 of the rollouts; give one each"
    )


def with_experts(rollout, sizes, offset=0):
    """A rollout whose record of experts counts."""
    length = len(rollout.prompt_ids) + len(rollout.ids) - 1 + offset
    experts = np.arange(length * np.prod(sizes), dtype=np.uint8)
    fields = vars(rollout) | {"experts": experts.reshape(length, *sizes)}
    return types.SimpleNamespace(**fields)


def test_experts_lie_at_the_tokens_that_were_read():
    rollouts = [with_experts(ROLLOUTS[0], (3, 2)), *ROLLOUTS[1:3]]
    found = rl.pack(rollouts, ADVANTAGES[:3], length=16, num_rows=2)
    experts = found.batch["experts"]
    row, span = found.places[0]
    start = span.start - len(ROLLOUTS[0].prompt_ids) + 1
    np.testing.assert_array_equal(experts[row, start : span.stop], rollouts[0].experts)
    assert experts.dtype == np.int16
    assert (experts >= 0).sum() == rollouts[0].experts.size  # -1 elsewhere
    assert "experts" not in packed().batch


def test_experts_that_do_not_fit_are_refused():
    rollouts = [with_experts(ROLLOUTS[0], (3, 2)), with_experts(ROLLOUTS[1], (3, 2), 1)]
    with pytest.raises(DataError) as error:
        rl.pack(rollouts, ADVANTAGES[:2], length=16, num_rows=2)
    assert str(error.value) == (
        "rollouts[1].experts=(11, 3, 2) is not a record of (3, 2) experts for each "
        "token but the last; draw all by one model"
    )
