"""Groups of rollouts of one prompt, complete and with rewards, for one step.

Groups of equal rewards teach nothing. They are counted, or dropped, and further prompts
are drawn in their place.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from zjax.errors import ConfigError, DataError, Problem
from zjax.rl.advantages import EstimateOfSeveral, group_advantages, summed
from zjax.rl.rollouts import Rollout

PENALTY = "overlong"
"""Name of the reward that `SoftPenalty` adds."""


GROUP_ADVANTAGES = summed(group_advantages)
"""Advantages of GRPO, of the sum of all rewards."""


@dataclasses.dataclass(frozen=True)
class SoftPenalty:
    """A penalty that grows linearly over the last tokens of the longest completion.

    Args:
        max_length: Number of tokens of the longest completion, 1 or more.
        num_tokens: Number of tokens over which the penalty falls from 0 to -1, 1 to
            `max_length`.

    Raises:
        ConfigError: `num_tokens` is out of range.

    Example:
        >>> penalty = SoftPenalty(max_length=20, num_tokens=4)
        >>> [penalty(length) for length in (16, 17, 20, 21)]
        [0.0, -0.25, -1.0, -1.0]

    Reference:
        Yu et al., DAPO (arXiv:2503.14476), equation 13.
    """

    max_length: int
    num_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= self.max_length:
            remedy = f"use 1 to {self.max_length}"
            value = self.num_tokens
            raise ConfigError(Problem("num_tokens", value, "is out of range", remedy))

    def __call__(self, length: int) -> float:
        """Returns the penalty of a completion of `length` tokens, -1 to 0."""
        excess = length - (self.max_length - self.num_tokens)
        return min(max(-excess / self.num_tokens, -1.0), 0.0)


Overlong = Literal["keep", "mask"] | SoftPenalty


@dataclasses.dataclass(frozen=True, eq=False)
class Experience:
    """What a step learns from.

    Args:
        rollouts: Rollouts in the order of prompts and samples.
        advantages: Advantage of each rollout, float32[N]; 0 in a group of equal
            rewards, and NaN, which leaves a rollout out, without a reward.
        rewards: Sum of the weighted rewards of each rollout with penalties, float32[N];
            NaN for a rollout without a reward.
        metrics: Statistics of all groups that were drawn, dropped ones too.
    """

    rollouts: Sequence[Rollout]
    advantages: np.ndarray
    rewards: np.ndarray
    metrics: Mapping[str, float]


class Groups:
    """Collects the groups of a step.

    Args:
        num_groups: Number of groups of a step, 1 or more.
        num_samples: Number of rollouts of a group, 1 or more.
        weights: Weight of each reward function, by name; one or more.
        estimate: Function from rewards [R, P, G] and weights [R] to advantages [P, G]:
            `summed(group_advantages)`, `summed(rloo_advantages)`,
            `decoupled_advantages`, ...
        max_groups: Most groups that a step draws, `num_groups` or more. Above
            `num_groups`, groups of equal rewards are dropped, and further groups are
            wanted; where too few groups have a signal, dropped groups fill the step.
        overlong: What happens to completions that are cut off at the greatest length:
            `keep` trains on them, `mask` leaves them out, after their rewards have
            counted in the mean of the group, and a `SoftPenalty` is added to rewards.

    Raises:
        ConfigError: A number is out of range, or there is no reward function.

    Example:
        >>> def draw(prompt, *rewards):
        ...     return [
        ...         Rollout(prompt=prompt, sample=n, given="", prompt_ids=[1], ids=[2],
        ...                 logprobs=[-0.5], finish_reason="stop", text="",
        ...                 rewards={"exact": reward})
        ...         for n, reward in enumerate(rewards)
        ...     ]
        >>> groups = Groups(1, 2, {"exact": 1.0}, max_groups=3)
        >>> groups.add(draw(0, 1.0, 1.0))
        >>> groups.num_wanted
        1
        >>> groups.add(draw(1, 1.0, 0.0))
        >>> groups.num_wanted, (groups.take().advantages > 0).tolist()
        (0, [True, False])

    Reference:
        Dropped groups: Yu et al., DAPO (arXiv:2503.14476), equation 11.
    """

    def __init__(
        self,
        num_groups: int,
        num_samples: int,
        weights: Mapping[str, float],
        *,
        estimate: EstimateOfSeveral = GROUP_ADVANTAGES,
        max_groups: int | None = None,
        overlong: Overlong = "keep",
    ):
        self._num_groups, self._num_samples = num_groups, num_samples
        self._max_groups = num_groups if max_groups is None else max_groups
        self._weights, self._estimate = dict(weights), estimate
        self._overlong = overlong
        if problems := [*self._problems()]:
            raise ConfigError(*problems)
        self._samples = collections.defaultdict[int, dict[int, Rollout]](dict)

    def _problems(self) -> Iterable[Problem]:
        """Yields numbers that are out of range."""
        for name in ("num_groups", "num_samples"):
            if (value := getattr(self, f"_{name}")) < 1:
                yield Problem(name, value, "is below 1", "use 1 or more")
        if self._max_groups < self._num_groups:
            problem, remedy = f"is below num_groups={self._num_groups}", "raise it"
            yield Problem("max_groups", self._max_groups, problem, remedy)
        if not self._weights or PENALTY in self._weights:
            problem = "names no reward function, or the penalty of long completions"
            remedy = f"name one, and another than {PENALTY!r}"
            yield Problem("weights", self._weights, problem, remedy)

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts so far, in the order of prompts and samples."""
        groups = sorted(self._samples.items())
        return [group[sample] for _, group in groups for sample in sorted(group)]

    @property
    def num_wanted(self) -> int:
        """Number of groups that are still to be drawn."""
        num_drawn = len(self._samples)
        missing = self._num_groups - num_drawn + len(self._dropped())
        return max(min(missing, self._max_groups - num_drawn), 0)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Adds rollouts with rewards, in any order.

        Args:
            rollouts: Rollouts of groups that may be incomplete so far.

        Raises:
            DataError: A rollout occurs twice, has no reward by a function, or is beyond
                the number of samples or groups; no rollout is added.
        """
        problems, new = [], dict[tuple[int, int], Rollout]()
        for each in rollouts:
            place = each.prompt, each.sample
            if place in new or each.sample in self._samples.get(each.prompt, ()):
                problems.append(_problem(each, "occurs a second time", "add it once"))
            if each.sample >= self._num_samples:
                problem = f"is beyond num_samples={self._num_samples}"
                problems.append(_problem(each, problem, "leave it out"))
            if missing := [x for x in self._weights if x not in each.rewards]:
                problem = f"has no reward by {', '.join(missing)}"
                problems.append(_problem(each, problem, "score it first"))
            new[place] = each
        num_drawn = len({prompt for prompt, _ in new} | {*self._samples})
        if num_drawn > self._max_groups:
            problem = f"are more than max_groups={self._max_groups}"
            remedy = f"add the {self.num_wanted} that are wanted"
            problems.append(Problem("groups", num_drawn, problem, remedy))
        if problems:
            raise DataError(*problems)
        for (prompt, sample), each in new.items():
            self._samples[prompt][sample] = each

    def take(self) -> Experience:
        """Returns what the step learns from, and forgets all groups.

        The step has the first `num_groups` groups that are not dropped.

        Raises:
            DataError: Groups are incomplete or missing; all are kept.
        """
        of = f"of {self._num_samples} samples"
        problems = [
            Problem("prompt", prompt, f"has {len(group)} {of}", "add all")
            for prompt, group in sorted(self._samples.items())
            if len(group) < self._num_samples
        ]
        if wanted := self.num_wanted:
            problem, remedy = f"lack {wanted} of {self._num_groups}", "add more"
            problems.append(Problem("groups", len(self._samples), problem, remedy))
        if problems:
            raise DataError(*problems)
        chosen = self._chosen()
        rewards = np.array([[self._rewards(x) for x in group] for group in chosen])
        rewards = np.moveaxis(rewards, -1, 0).astype(np.float32)
        # A penalty comes last, with the weight 1.
        weights = jnp.array([*self._weights.values(), 1.0][: len(rewards)], jnp.float32)
        estimated = self._estimate(jnp.asarray(rewards), weights)
        advantages = np.asarray(estimated, np.float32).reshape(-1)
        rollouts = [rollout for group in chosen for rollout in group]
        totals = np.array([self._total(x) for x in rollouts], np.float32)
        # An advantage of 0 would count in the means of the loss.
        advantages = np.where(np.isnan(totals), np.float32(np.nan), advantages)
        kept = np.array([not self._is_masked(rollout) for rollout in rollouts])
        found = Experience(
            [*itertools.compress(rollouts, kept)],
            advantages[kept],
            totals[kept],
            self._metrics(),
        )
        self._samples.clear()
        return found

    def _rewards(self, rollout: Rollout) -> list[float]:
        """Lists the rewards by function, and the penalty; NaN for a missing reward."""
        given = [rollout.rewards[name] for name in self._weights]
        found = [math.nan if x is None else x for x in given]
        if isinstance(self._overlong, SoftPenalty):
            found.append(self._overlong(len(rollout.ids)))
        return found

    def _total(self, rollout: Rollout) -> float:
        """Sums the rewards by weight, and the penalty; NaN without a reward."""
        total = rollout.total(self._weights)
        penalties = self._rewards(rollout)[len(self._weights) :]
        return math.nan if total is None else total + sum(penalties)

    def _is_masked(self, rollout: Rollout) -> bool:
        """Whether a rollout is left out, as it was cut off."""
        return self._overlong == "mask" and rollout.finish_reason == "length"

    def _is_uniform(self, group: Mapping[int, Rollout]) -> bool:
        """Whether no reward that counts tells two samples with rewards apart."""
        names = [name for name, weight in self._weights.items() if weight]
        scored = [x for x in group.values() if x.total(self._weights) is not None]
        return all(len({x.rewards[name] for x in scored}) < 2 for name in names)

    def _dropped(self) -> list[int]:
        """Lists prompts whose complete groups teach nothing, if these are dropped."""
        return [
            prompt
            for prompt, group in sorted(self._samples.items())
            if self._max_groups > self._num_groups
            and len(group) == self._num_samples
            and self._is_uniform(group)
        ]

    def _chosen(self) -> list[list[Rollout]]:
        """Lists the groups of the step, in the order of prompts."""
        dropped = self._dropped()
        kept = sorted({*self._samples} - {*dropped})
        chosen = sorted([*kept, *dropped][: self._num_groups])
        return [[x for _, x in sorted(self._samples[p].items())] for p in chosen]

    def _metrics(self) -> dict[str, float]:
        """Averages over all rollouts that were drawn."""
        rollouts, groups = self.rollouts, self._samples.values()
        totals = np.array([self._total(x) for x in rollouts])
        by_name = {
            f"reward/{name}": _mean([x.rewards[name] for x in rollouts])
            for name in self._weights
        }
        scored = totals[~np.isnan(totals)]
        return by_name | {
            "reward": _mean(scored),
            "reward_std": float(scored.std()) if scored.size else math.nan,
            "unscorable": float(np.isnan(totals).mean()),
            "completion_length": _mean([len(x.ids) for x in rollouts]),
            "truncated": _mean([x.finish_reason == "length" for x in rollouts]),
            "uniform_groups": _mean([self._is_uniform(group) for group in groups]),
            "num_drawn_groups": float(len(groups)),
        }


def _mean(values: Iterable[Any]) -> float:
    """Averages numbers that are not None; NaN without a number."""
    found = [float(x) for x in values if x is not None]
    return sum(found) / len(found) if found else math.nan


def _problem(rollout: Rollout, problem: str, remedy: str) -> Problem:
    """Names a rollout."""
    return Problem(f"prompt {rollout.prompt}, sample", rollout.sample, problem, remedy)
