"""Groups: what a step learns from, against NumPy, and what is dropped or left out."""

import re

import numpy as np
import pytest

from tests.support.refusals import config_error
from zjax import rl
from zjax.errors import DataError

WEIGHTS = {"exact": 1.0, "short": 0.5}

SUMMED = rl.summed(rl.group_advantages)


def draw(prompt, exact, short=None, *, lengths=None, reasons=None):
    """A group with a reward of each function for each sample."""
    num = len(exact)
    short, lengths = short or [0.0] * num, lengths or [2] * num
    reasons = reasons or ["stop"] * num
    return [
        rl.Rollout(
            prompt=prompt,
            sample=sample,
            given="?",
            prompt_ids=[1],
            ids=[2] * lengths[sample],
            logprobs=[-0.5] * lengths[sample],
            finish_reason=reasons[sample],
            text="!",
            rewards={"exact": exact[sample], "short": short[sample]},
        )
        for sample in range(num)
    ]


def places(rollouts):
    return [(x.prompt, x.sample) for x in rollouts]


def refused(text):
    return pytest.raises(DataError, match=re.escape(text) + "$")


def normalised(rewards):
    rewards = np.asarray(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)


def test_rewards_are_summed_and_then_normalised_in_each_group():
    groups = rl.Groups(2, 3, WEIGHTS)
    second = draw(9, [1.0, 0.0, 0.0], [1.0, 0.0, 1.0])
    groups.add(second[::-1])
    assert groups.num_wanted == 1
    groups.add(draw(4, [0.0, 2.0, 1.0]))
    found = groups.take()
    assert places(found.rollouts) == [(p, n) for p in (4, 9) for n in range(3)]
    wanted = [*normalised([0, 2, 1]), *normalised([1.5, 0, 0.5])]
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.rewards, [0, 2, 1, 1.5, 0, 0.5])
    assert found.advantages.dtype == found.rewards.dtype == np.float32
    assert groups.rollouts == [] and groups.num_wanted == 2


def test_rewards_may_be_normalised_before_they_are_summed():
    groups = rl.Groups(1, 3, WEIGHTS, estimate=rl.decoupled_advantages)
    groups.add(draw(0, [1.0, 0.0, 0.0], [0.0, 300.0, 100.0]))
    wanted = normalised([1, 0, 0]) + 0.5 * normalised([0, 300, 100])
    np.testing.assert_allclose(groups.take().advantages, wanted, rtol=1e-5)


@pytest.mark.parametrize("estimate", [SUMMED, rl.decoupled_advantages])
def test_a_sample_without_one_of_its_rewards_is_left_out(estimate):
    """Fails if a part of a sum stands for the whole, or counts in the loss."""
    groups = rl.Groups(1, 4, WEIGHTS, estimate=estimate)
    groups.add(draw(0, [1.0, None, 0.0, 1.0], [0.0, 2.0, 0.0, None]))
    found = groups.take()
    high, low = normalised([1, 0])
    np.testing.assert_allclose(found.advantages, [high, np.nan, low, np.nan], 1e-5)
    packed = rl.pack(found.rollouts, found.advantages, length=8, num_rows=4)
    assert [place is None for place in packed.places] == [False, True, False, True]
    np.testing.assert_allclose(found.rewards, [1, np.nan, 0, np.nan])
    assert found.metrics["unscorable"] == 0.5
    assert found.metrics["reward"] == 0.5


@pytest.mark.parametrize("rewards", [[0.0], [1.0, 1.0], [None, None], [None, 0.3]])
def test_a_group_without_a_signal_teaches_nothing(rewards):
    for estimate in (rl.summed(rl.rloo_advantages), rl.decoupled_advantages):
        groups = rl.Groups(1, len(rewards), WEIGHTS, estimate=estimate)
        groups.add(draw(0, rewards, rewards))
        found = groups.take()
        assert not np.nan_to_num(found.advantages).any()
        assert found.metrics["uniform_groups"] == 1.0


def test_a_group_with_one_sample_of_all_rewards_has_no_signal():
    """Fails if a reward of a sample that is left out tells samples apart."""
    groups = rl.Groups(1, 2, WEIGHTS, max_groups=2)
    groups.add(draw(0, [1.0, None], [1.0, 0.0]))
    assert groups.num_wanted == 1


def test_groups_of_equal_rewards_are_dropped_and_others_wanted():
    """Fails if a dead group trains, or if it is not replaced."""
    groups = rl.Groups(2, 2, WEIGHTS, max_groups=5)
    groups.add([*draw(0, [1.0, 1.0]), *draw(1, [1.0, 0.0])])
    assert groups.num_wanted == 1
    groups.add(draw(2, [0.0, 0.0]))
    assert groups.num_wanted == 1
    half, other = draw(3, [0.0, 1.0])
    groups.add([half])  # as long as it is incomplete, it may have a signal
    assert groups.num_wanted == 0
    groups.add([other])
    found = groups.take()
    assert places(found.rollouts) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert (found.advantages != 0).all()
    assert found.metrics["uniform_groups"] == 0.5
    assert found.metrics["num_drawn_groups"] == 4.0


def test_dropped_groups_fill_a_step_that_found_too_few():
    groups = rl.Groups(3, 2, WEIGHTS, max_groups=4)
    for prompt in range(3):
        groups.add(draw(prompt, [1.0, 1.0]))
    assert groups.num_wanted == 1  # of 3, within 4
    groups.add(draw(3, [1.0, 0.0]))
    assert groups.num_wanted == 0
    found = groups.take()
    assert places(found.rollouts)[::2] == [(0, 0), (1, 0), (3, 0)]
    assert (found.advantages != 0).tolist() == [False] * 4 + [True] * 2


def test_groups_are_counted_where_none_is_dropped():
    groups = rl.Groups(2, 2, {"exact": 1.0, "short": 0.0})
    # A reward without a weight is no signal.
    groups.add([*draw(0, [1.0, 1.0], [0.0, 9.0]), *draw(1, [1.0, 0.0])])
    assert groups.num_wanted == 0
    found = groups.take()
    assert len(found.rollouts) == 4
    assert found.metrics["uniform_groups"] == 0.5
    assert found.metrics["reward/short"] == 2.25


CUT = {"lengths": [2, 4, 4], "reasons": ["stop", "length", "stop"]}


def test_a_step_has_its_number_of_groups_where_more_were_drawn():
    groups = rl.Groups(1, 2, WEIGHTS, max_groups=4)
    groups.add([x for n in range(4) for x in draw(n, [float(n > 0), 0.0])])
    assert groups.num_wanted == 0
    found = groups.take()
    assert places(found.rollouts) == [(1, 0), (1, 1)]
    assert found.metrics["num_drawn_groups"] == 4.0


def test_long_completions_are_left_out_behind_the_mean_of_the_group():
    groups = rl.Groups(1, 3, WEIGHTS, overlong="mask")
    groups.add(draw(0, [1.0, 0.0, 0.5], **CUT))
    found = groups.take()
    assert places(found.rollouts) == [(0, 0), (0, 2)]
    wanted = normalised([1, 0, 0.5])[[0, 2]]
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-5)
    assert found.rewards.tolist() == [1.0, 0.5]
    assert found.metrics["truncated"] == pytest.approx(1 / 3)
    groups = rl.Groups(1, 3, WEIGHTS)
    groups.add(draw(0, [1.0, 0.0, 0.0], **CUT))
    assert len(groups.take().rollouts) == 3


@pytest.mark.parametrize(
    ("estimate", "wanted"),
    [
        (rl.summed(rl.group_advantages), normalised([1, 0.5, -1])),
        (rl.decoupled_advantages, normalised([1, 1, 0]) + normalised([0, -0.5, -1])),
    ],
    ids=["summed", "decoupled"],
)
def test_long_completions_are_penalised(estimate, wanted):
    penalty = rl.SoftPenalty(max_length=6, num_tokens=2)
    groups = rl.Groups(1, 4, {"exact": 1.0}, overlong=penalty, estimate=estimate)
    groups.add(draw(0, [1.0, 1.0, 0.0, None], lengths=[4, 5, 6, 6]))
    found = groups.take()
    np.testing.assert_allclose(found.advantages, [*wanted, np.nan], rtol=1e-5)
    np.testing.assert_allclose(found.rewards, [1, 0.5, -1, np.nan])


def test_the_penalty_is_the_one_of_dapo():
    """Equation 13: 0 up to the band, -1 from its end, and a line between."""
    longest, band = 50, 20
    penalty = rl.SoftPenalty(longest, band)
    for length in range(1, 60):
        if length <= longest - band:
            wanted = 0.0
        elif length <= longest:
            wanted = ((longest - band) - length) / band
        else:
            wanted = -1.0
        assert penalty(length) == pytest.approx(wanted)


def test_what_cannot_be_added_is_refused_and_nothing_is_added():
    groups = rl.Groups(1, 2, WEIGHTS)
    first, second = draw(0, [1.0, 0.0])
    beyond = draw(0, [1.0, 1.0, 1.0])[2]
    [unscored] = draw(1, [1.0])
    del unscored.rewards["short"]
    with refused(
        "prompt 0, sample=0 occurs a second time; add it once\n"
        "prompt 0, sample=2 is beyond num_samples=2; leave it out\n"
        "prompt 1, sample=0 has no reward by short; score it first\n"
        "groups=2 are more than max_groups=1; add the 1 that are wanted"
    ):
        groups.add([second, first, first, beyond, unscored])
    assert groups.rollouts == []
    groups.add([second])
    with refused("prompt=0 has 1 of 2 samples; add all"):
        groups.take()
    groups.add([first])
    assert places(groups.rollouts) == [(0, 0), (0, 1)]
    assert len(groups.take().rollouts) == 2
    with refused("groups=0 lack 1 of 1; add more"):
        groups.take()


def test_numbers_out_of_range_are_refused():
    with config_error(
        "num_groups=0 is below 1; use 1 or more\n"
        "num_samples=0 is below 1; use 1 or more\n"
        "max_groups=-1 is below num_groups=0; raise it\n"
        "weights={} names no reward function, or the penalty of long completions; "
        "name one, and another than 'overlong'"
    ):
        rl.Groups(0, 0, {}, max_groups=-1)
    with config_error("num_tokens=7 is out of range; use 1 to 6"):
        rl.SoftPenalty(6, 7)
