"""Settings become the objective that a paper has."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from zjax import rl
from zjax.config import check_config, load_config
from zjax.rl.credit import token_advantages
from zjax.rl.minibatches import Minibatches
from zjax.rl.recipes import aggregation_of, make_groups, make_objective
from zjax.rl.rollouts import Rollout
from zjax.settings import rl as settings

PAGE = (pathlib.Path(__file__).parents[2] / "docs/rl.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| \[.*\| `(.+)` \|$", PAGE, re.M))
EXPECTED = {
    "GRPO": (rl.Clip(), "sequence_mean"),
    "Dr. GRPO": (rl.Clip(), "constant_mean"),
    "DAPO": (rl.Clip(0.2, 0.28), "token_mean"),
    "GSPO": (rl.Clip(3e-4, 4e-4), "sequence_mean"),
    "CISPO": (rl.Cispo(), "token_mean"),
    "SAPO": (rl.Sapo(), "sequence_mean"),
    "RLOO": (rl.Reinforce(), "constant_mean"),
    "REINFORCE++": (rl.Clip(), "token_mean"),
    "PPO": (rl.Clip(), "token_mean"),
    "GDPO": (rl.Clip(), "sequence_mean"),
    "dual clip": (rl.Clip(bound=3.0), "sequence_mean"),
    "truncated importance sampling": (rl.Clip(), "sequence_mean"),
}


def chosen(text):
    return load_config({}, *text.split("; "))


def test_the_page_lists_the_recipes():
    assert {*ROWS} == {*EXPECTED}


@pytest.mark.parametrize("method", EXPECTED)
def test_settings_of_a_paper_make_its_objective(method, tmp_path):
    config = chosen(ROWS[method].replace("runs/sft", str(tmp_path)))
    check_config(config, num_devices=8)
    objective = make_objective(config.rl)
    found = objective.loss, aggregation_of(config.rl.objective)
    assert found == EXPECTED[method]
    assert objective.ratios == ("sequences" if method == "GSPO" else "tokens")
    assert (objective.value == rl.Value(0.1, 0.2)) == (method == "PPO")
    assert config.model.value_head == (method == "PPO")
    assert (objective.kl == rl.Kl(0.04, "k3")) == (method == "GRPO")
    is_corrected = method == "truncated importance sampling"
    assert (objective.correction == rl.Correction()) == is_corrected
    assert config.global_batch_size <= config.rl.num_texts


@pytest.mark.parametrize(
    ("override", "advantages"),
    [
        ("rl.objective=grpo", [0.5**0.5, -(0.5**0.5)]),
        ("rl.objective=dr_grpo", [0.5, -0.5]),
        ("rl.objective=rloo", [1.0, -1.0]),
        ("rl.objective=grpo;rl.objective.baseline=group_mean", [0.5, -0.5]),
        ("rl.objective=reinforce_pp", [1.0, 0.0]),
    ],
)
def test_baselines_of_recipes(override, advantages):
    config = load_config({}, *override.split(";"), "rl.rewards=[{'function': 'a:b'}]")
    groups = make_groups(config.rl, 1, 2)
    groups.add(texts([3, 3], rewards=[1.0, 0.0]))
    np.testing.assert_allclose(groups.take().advantages, advantages, rtol=1e-3)


@pytest.mark.parametrize("kind", ["grpo", "cispo", "rloo", "ppo"])
def test_entropy_and_the_mask_of_sequences_reach_the_loss(kind):
    """Fails if a setting of these stays a number in the config."""
    usual = make_objective(chosen(f"rl.objective={kind}").rl)
    assert (usual.entropy_weight, usual.threshold) == (0.0, None)
    given = f"rl.objective={kind}; rl.objective.entropy_weight=0.03"
    mask = "; rl.objective.max_sampler_gap=0.2" * (kind != "ppo")
    found = make_objective(chosen(given + mask).rl)
    changed = {"entropy_weight": 0.03, "threshold": 0.2 if mask else None}
    assert found == dataclasses.replace(usual, **changed)


def texts(lengths, rewards):
    return [
        Rollout(
            prompt=0,
            sample=number,
            given="",
            prompt_ids=[1],
            ids=[2] * length,
            logprobs=[-1.0] * length,
            finish_reason="stop",
            text="",
            rewards={"a:b": reward},
        )
        for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]


def test_overlong_texts_are_penalised_over_a_fifth_of_the_limit():
    config = load_config(
        {},
        "rl.overlong=penalise",
        "rl.rollout.max_new_tokens=10",
        "rl.rewards=[{'function': 'a:b'}]",
    )
    groups = make_groups(config.rl, 1, 3)
    groups.add(texts([8, 9, 10], [1.0, 1.0, 1.0]))
    np.testing.assert_allclose(groups.take().rewards, [1.0, 0.5, 0.0])


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_advantages_of_tokens_are_whitened_returns(discount):
    """Fails if a penalty or a discount is left out, or padding counts."""
    rewards = np.float32([1.0, np.nan, 0.0])
    penalties = [np.float32([0.1, 0.2]), np.float32([0.3]), np.float32([0.4] * 3)]
    objective = settings.ReinforcePp(discount=discount)
    found, returns = token_advantages(objective, rewards, penalties)
    expected = []
    for reward, penalty in ((1.0, penalties[0]), (0.0, penalties[2])):
        given = -penalty.astype(float)
        given[-1] += reward
        total, later = [], 0.0
        for x in given[::-1]:
            later = x + discount * later
            total.insert(0, later)
        expected.append(np.array(total))
    np.testing.assert_allclose(returns[0], expected[0], rtol=1e-5)
    joined = np.concatenate(expected)
    scaled = [(x - joined.mean()) / joined.std(ddof=1) for x in expected]
    np.testing.assert_allclose(found[0], scaled[0], rtol=1e-4)
    np.testing.assert_allclose(found[2], scaled[1], rtol=1e-4)
    assert np.isnan(found[1]).all()


def minibatches(**changed):
    given = {
        "num_texts": 16,
        "row_multiple": 4,
        "length": 8,
        "aggregation": "token_mean",
        "constant": 0,
        "num_epochs": 2,
        "seed": 0,
    }
    return Minibatches(**(given | changed))


def test_each_epoch_takes_each_text_once_in_another_order():
    steps = [*minibatches().split(40, step=3)]
    # Steps of 16, 16 and 8 texts would learn at one rate from other numbers.
    assert [len(step) for step in steps] == [14, 13, 13] * 2
    epochs = [[*np.concatenate(x)] for x in (steps[:3], steps[3:])]
    assert [sorted(epoch) for epoch in epochs] == [[*range(40)]] * 2
    assert epochs[0] != epochs[1]
    assert [*minibatches().split(40, step=3)] == steps
    assert [*minibatches().split(40, step=9)] != steps


def test_rows_of_batches_are_few_numbers_that_divide_over_devices():
    assert minibatches().row_counts == (4, 8, 12, 16)
    counts = minibatches(num_texts=512, row_multiple=8).row_counts
    assert len(counts) == 8
    assert counts[-1] == 512
    assert {count % 8 for count in counts} == {0}


def test_short_texts_share_rows():
    """Fails if each text takes a row, which is padding for the most part."""
    given = texts([2] * 16, [0.0] * 16)
    packed = minibatches().pack(given, np.ones(16), {}, [*range(16)])
    assert packed.batch["tokens"].shape == (8, 8)
    assert packed.num_tokens == 48
    example = minibatches().example(["old_logprobs"])
    assert example["tokens"].shape == (16, 8)
    assert example["rl"]["old_logprobs"].shape == (16, 8)
