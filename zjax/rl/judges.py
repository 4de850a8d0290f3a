"""Judges of a run's texts, as the settings name them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from zjax.errors import CheckpointError, DataError, Problem
from zjax.processes.broadcast import compute_once
from zjax.rl.reward_run import RewardRun, judge_problems
from zjax.rl.rewards import RewardPool, add_scores
from zjax.rl.rollouts import Rollout
from zjax.rl.stopping import Stopped, check, never, until
from zjax.settings import rl, schema

Rewards = dict[str, float | None]
"""Rewards of a text, by name."""


def check_judges(config: schema.Config) -> None:
    """Refuses runs that cannot judge the texts of the policy.

    Raises:
        CheckpointError: A run has no checkpoint, no values, or other tokens.
    """
    assert config.rl is not None  # of the trainer
    named = [
        (f"rl.rewards[{index}].directory", reward.directory)
        for index, reward in enumerate(config.rl.rewards)
        if isinstance(reward, rl.RunReward)
    ]
    problems = [
        problem
        for field, directory in named
        for problem in judge_problems(directory, config, field)
    ]
    if problems:
        raise CheckpointError(*problems)


class Judges:
    """Reward functions in processes, and reward models on the policy's devices.

    Args:
        settings: Settings of `config.rl`, with rewards.
        run: `zjax.Run` of the policy.

    Raises:
        CheckpointError: A reward model that cannot be read, or does not fit.
    """

    def __init__(self, settings: rl.Rl, run: Any):
        self._settings, self._has_started = settings, False
        self._runs = {
            reward.name: RewardRun(reward.directory, run, memory=reward.memory)
            for reward in settings.rewards
            if isinstance(reward, rl.RunReward)
        }

    @functools.cached_property
    def _pool(self) -> RewardPool:
        """Processes of the reward functions."""
        return RewardPool(
            self.functions,
            num_processes=self._settings.reward_processes or None,
            seconds=self._settings.reward_seconds,
        )

    @property
    def functions(self) -> list[str]:
        """Names of the reward functions."""
        rewards = self._settings.rewards
        return [x.name for x in rewards if isinstance(x, rl.FunctionReward)]

    @property
    def steps(self) -> dict[str, int]:
        """Steps of the weights of reward models, by name."""
        return {f"step of {name}": run.step for name, run in self._runs.items()}

    def start(self) -> None:
        """Starts the processes of process 0, which import the functions.

        Raises:
            ConfigError: A function cannot be imported.
        """
        if self.functions and not self._has_started:
            compute_once(lambda: bool(self._pool))
            self._has_started = True

    def score(
        self, rollouts: Sequence[Rollout], *, stopped: Stopped = never
    ) -> list[Rollout]:
        """Adds the rewards of all judges to rollouts.

        Args:
            rollouts: Texts without rewards.
            stopped: Function that is asked between texts whether to stop.

        Returns:
            Copies with rewards, in order. A text that a function failed for has none.

        Raises:
            DataError: A judge has a reward for no text, or one that is not finite.
            RolloutStopped: The function said so.
        """
        scored = [*rollouts]
        for name, run in self._runs.items():
            check(stopped)
            scored = add_scores(scored, name, run)
            if all(x.rewards[name] is None for x in scored):
                problem, remedy = "scores none of the texts", "shorten the texts"
                raise DataError(Problem("rewards", name, problem, remedy))
        # Last: a function that fails takes the rewards before from a text.
        if not self.functions:
            return scored

        def judge() -> list[Rewards]:
            judged = self._pool.score(until(stopped, scored))
            return [dict(rollout.rewards) for rollout in judged]

        pairs = zip(scored, compute_once(judge), strict=True)
        return [dataclasses.replace(x, rewards=rewards) for x, rewards in pairs]

    def close(self) -> None:
        """Ends the processes."""
        if "_pool" in vars(self):
            self._pool.close()
