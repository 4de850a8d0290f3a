"""A saved reward model judges rollouts by the value of the last token."""

import dataclasses
import functools
import types

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.rl.test_critic import values_by_hand
from tests.rl.test_policy import ROLLOUTS, make_config, packed
from tests.support import policies, small_run
from tests.support.first_state import first_state
from zjax import rl
from zjax.run.build import make_run

SHAPE = {f"model.{name}": x for name, x in policies.MODEL.items()}


def save(directory, **changes):
    """A run whose model has random values, saved before its first step."""
    shape = SHAPE | {"model.value_head": True, "model.dropout_rate": 0} | changes
    settings = [f"{name}={value!r}" for name, value in shape.items()]
    trainer = small_run.make_trainer(directory, *settings, num_devices=1)
    master = trainer.state.master
    if "value" in master["head"]:
        drawn = jax.random.normal(jax.random.key(5), master["head"]["value"].shape)
        master = master | {"head": master["head"] | {"value": drawn}}
        trainer.state = dataclasses.replace(trainer.state, master=master)
    with trainer.loader:
        trainer.save()
    trainer.close()
    return trainer


def policy(settings):
    config, batch = make_config(settings), packed().batch
    model = rl.policy_model(config, rl.Objective())
    devices = jax.devices()[: config.mesh.data]
    given = {"devices": devices, "batch": batch, "restore": first_state(config, model)}
    return make_run(config, model, optax.sgd(1.0), **given)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("judge")
    return directory, save(directory)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_rewards_are_values_of_last_tokens(judge, memory):
    directory, trainer = judge
    run = policy("mesh.data=2 zero.stage=3")
    found = rl.RewardRun(str(directory), run, num_rows=3, memory=memory)
    long = dict(vars(ROLLOUTS[0]), ids=np.ones(30, np.int32), logprobs=np.zeros(30))
    rewards = found.score([*ROLLOUTS, types.SimpleNamespace(**long)])
    assert rewards.pop() is None
    params = jax.tree.map(np.asarray, trainer.state.master)
    # The value of the last token, which the values of tokens drawn end before.
    texts = [
        types.SimpleNamespace(prompt_ids=[*x.prompt_ids, x.ids[0]], ids=[*x.ids[1:], 0])
        for x in ROLLOUTS
    ]
    sizes = [len(x.prompt_ids) + len(x.ids) for x in texts]
    kept = [i for i, size in enumerate(sizes) if size <= policies.LENGTH]
    fitting = [texts[i] for i in kept]
    compute = functools.partial(values_by_hand, trainer.run.model, rollouts=fitting)
    by_hand = jax.jit(compute)(params)
    for i, values in zip(kept, by_hand, strict=True):
        np.testing.assert_allclose(rewards[i], values[-1], rtol=1e-4, atol=1e-5)
    assert len({round(x, 4) for x in rewards}) == len(rewards)
    assert found.score(ROLLOUTS[:1]) == pytest.approx(rewards[:1], rel=1e-5)


def test_runs_that_cannot_judge_are_refused(tmp_path):
    run = policy("mesh.data=1")
    with pytest.raises(zjax.errors.CheckpointError) as error:
        rl.RewardRun(str(tmp_path / "none"), run)
    assert str(error.value) == (
        f"rewards='{tmp_path / 'none'}' holds no checkpoint; give the directory of a "
        "run"
    )
    save(tmp_path / "other", **{"model.value_head": False, "model.vocab_size": 43})
    with pytest.raises(zjax.errors.CheckpointError) as error:
        rl.RewardRun(str(tmp_path / "other"), run)
    assert str(error.value).splitlines() == [
        f"rewards='{tmp_path / 'other'}' has no values; train it with "
        "preference=reward_model",
        f"rewards='{tmp_path / 'other'}' has 43 tokens, and the policy 41; train it "
        "with the policy's tokenizer",
    ]
