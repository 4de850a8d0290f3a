"""A critic of its own learns values beside a policy that has none."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import rl_run
from tests.support.refusals import checkpoint_error
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.config import load_config
from zjax.errors import ConfigError, NonFiniteError
from zjax.rl.critic import critic_model
from zjax.settings.critic import critic_settings

SETTINGS = (
    "rl.objective=ppo",
    "rl.critic=own",
    "rl.critic.peak_learning_rate=0.25",
    "optimizer.rule=sgd",
    "optimizer.rule.b1=0",
    "optimizer.peak_learning_rate=0.5",
    "optimizer.schedule=constant",
    "optimizer.schedule.num_warmup_steps=0",
    "optimizer.clip_norm=inf",
    "optimizer.weight_decay=0",
    "model.num_layers=1",
    "model.embed_size=16",
    "zero.stage=3",
    "zero.min_shard_elements=16",
    "num_steps=2",
    "checkpoint.every_steps=1",
)
RATES = 0.5, 0.25


def make_trainer(directory, *overrides, **given):
    given = {"num_devices": 2} | given
    return rl_run.make_trainer(directory, *SETTINGS, *overrides, **given)


def params_of(run, state):
    return stacked(unpadded(state.master, run.plan.master))


def assert_same(found, expected):
    found, expected = (jax.tree.map(np.asarray, x) for x in (found, expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Two steps, with weights before and after the first, and what it learned from."""
    directory = tmp_path_factory.mktemp("own")
    params, batches, found = [], [], {}

    def look(step, state, batch, metrics):
        batches.append(jax.tree.map(np.asarray, batch))
        models = (trainer.run, state), (critic.run, critic.state)
        params.append([params_of(*x) for x in models])

    trainer = make_trainer(directory, after_step=[look])
    critic = trainer._critic
    models = (trainer.run, trainer.state), (critic.run, critic.state)
    params.append([params_of(*x) for x in models])
    shards = [x.addressable_shards[0] for x in jax.tree.leaves(critic.state.master)]
    found["bytes"] = sum(shard.data.nbytes for shard in shards)
    trainer.fit()
    trainer.close()
    found |= {"trainer": trainer, "params": params, "batches": batches}
    return found | {"directory": directory}


def test_one_update_is_that_of_plain_jax(learned):
    """Fails if a loss reaches the other model, or values are of other weights."""
    trainer = learned["trainer"]
    # The second: values that start at 0 give the blocks of a critic no gradient.
    before, after = learned["params"][1:]
    batch = jax.tree.map(jnp.asarray, learned["batches"][1])
    settings = trainer.config.rl
    objective = rl.Objective(rl.Clip(*settings.objective.clip))
    value = rl.Value(clip=settings.objective.value_clip)
    models = (
        rl.policy_model(trainer.config, objective),
        critic_model(critic_settings(trainer.config), value),
    )
    for model, old, new, rate in zip(models, before, after, RATES, strict=True):
        loss = jax.jit(jax.grad(lambda p, m=model: m.loss(p, {}, batch, None).value))
        gradient = loss(jax.tree.map(jnp.asarray, old))
        assert max(float(abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3
        jax.tree.map(
            lambda x, y, g, r=rate: np.testing.assert_allclose(
                (x - y) / r, g, rtol=2e-3, atol=2e-6
            ),
            *(old, new, gradient),
        )


def test_the_policy_has_no_values_and_the_critic_a_share_on_each_device(learned):
    """Fails if both are one model, or ZeRO leaves the critic whole."""
    policy, critic = learned["params"][0]
    assert "value" not in policy["head"]
    assert not critic["head"]["value"].any()
    assert learned["params"][1][1]["head"]["value"].any()
    total = sum(x.nbytes for x in jax.tree.leaves(critic))
    assert total / 2 <= learned["bytes"] < 0.6 * total


def test_advantages_read_the_values_of_the_critic(learned):
    first, second = (batch["rl"]["values"] for batch in learned["batches"])
    assert not first.any()
    assert second.any()
    row = rl_run.records(learned["directory"])[0]
    assert {"value", "value_loss", "critic_grad_norm"} <= {*row}
    assert row["value_loss"] > 0
    assert row["critic_skipped_steps"] == 0
    assert learned["trainer"]._skipped_beside == {"critic_": 0}


def test_a_critic_starts_from_weights_of_its_own(learned, tmp_path):
    """Fails if the critic begins at random, or the policy with the critic."""
    directory = learned["directory"]
    trainer = make_trainer(tmp_path, f"rl.critic.init_from={directory}")
    critic = params_of(trainer._critic.run, trainer._critic.state)
    assert not critic["head"].pop("value").any()
    assert_same(critic, learned["params"][2][0])
    assert_same(params_of(trainer.run, trainer.state), learned["params"][0][0])
    trainer.close()


def test_settings_of_a_critic_are_the_policys_but_for_the_start():
    given = "lora.rank=2", "optimizer.ema_decay=0.9", "checkpoint.init_from=sft"
    more = "rl.critic.init_from=judge", "checkpoint.resize_vocabulary=True"
    found = critic_settings(load_config(rl_run.SETTINGS, *SETTINGS, *given, *more))
    assert found.checkpoint.init_from == "judge"
    assert not found.checkpoint.resize_vocabulary
    assert found.optimizer.ema_decay == 0
    assert found.optimizer.peak_learning_rate == 0.25
    assert found.lora is None
    found = critic_settings(load_config(rl_run.SETTINGS, *SETTINGS, *given))
    assert found.checkpoint.init_from == "sft"


def test_a_critic_needs_its_setting_to_go_on(learned, tmp_path):
    """Fails if a run without the setting drops the critic in silence."""
    shutil.copytree(learned["directory"], tmp_path / "run")
    told = "rl.critic='shared' was 'own' in the saved run, whose models are others; "
    told += "restore it, or start another run with checkpoint.init_from="
    with checkpoint_error(f"{told}{tmp_path / 'run'}"):
        rl_run.make_trainer(tmp_path / "run", "rl.objective=ppo", num_devices=2)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (
            "update",
            "critic_grad_norm=nan is not finite at step 1, whose update was applied; "
            "go back to the last checkpoint, and lower optimizer.peak_learning_rate or "
            "look at the data",
        ),
        (
            "skip",
            "precision.on_nonfinite='skip' skipped all 1 steps, starting with "
            "critic_grad_norm=nan at step 1; lower optimizer.peak_learning_rate or "
            "look at the data; earlier checkpoints are unaffected",
        ),
    ],
)
def test_a_critic_that_is_not_finite_ends_the_run_by_name(tmp_path, policy, told):
    """Fails if the policy, which learns of no text then, is told to be the cause."""
    given = f"precision.on_nonfinite={policy}", "num_steps=1"
    trainer = make_trainer(tmp_path, *given, num_devices=1)
    critic = trainer._critic
    lost = jax.tree.map(lambda x: x * jnp.nan, critic.state.master)
    critic.state = dataclasses.replace(critic.state, master=lost)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit()
    assert str(error.value).splitlines()[0] == told
    trainer.close()


def test_a_given_optimizer_has_its_own_learning_rate(tmp_path):
    text = "rl.critic.peak_learning_rate=0.25 has no effect on the optimizer that was "
    text += "given; leave it at 0.0, or give no optimizer"
    with pytest.raises(ConfigError) as error:
        make_trainer(tmp_path, tx=optax.sgd(0.1))
    assert text in str(error.value)


def test_a_critic_goes_on_bit_for_bit(learned, tmp_path):
    """Fails if a checkpoint lacks the critic, or a resumed run begins it anew."""
    shutil.copytree(learned["directory"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    trainer = make_trainer(tmp_path / "run")
    critic = trainer._critic
    assert_same(params_of(critic.run, critic.state), learned["params"][1][1])
    trainer.fit()
    trainer.close()
    expected = learned["trainer"]
    assert_same(trainer.state, expected.state)
    assert_same(trainer._critic.state, expected._critic.state)
