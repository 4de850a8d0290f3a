"""Rewards of rollouts: functions of users in processes, and models that score."""

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol, runtime_checkable

from absl import logging

from zjax.errors import ConfigError, DataError, Problem
from zjax.rl.reward_process import RewardProcess
from zjax.rl.reward_worker import Answer
from zjax.rl.rollouts import Rollout
from zjax.schedule.pacing import is_function_name

NUM_TOLD = 3
"""Most failures of a function that a step logs one by one."""
MAX_PROCESSES = 8
"""Most processes where no number is given: each imports the functions anew."""


@runtime_checkable
class Scorer(Protocol):
    """A judge of rollouts in this process, such as a reward model."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Returns the reward of each rollout; None for a rollout without a reward."""
        ...


def add_scores(rollouts: Sequence[Rollout], name: str, scorer: Scorer) -> list[Rollout]:
    """Adds the rewards of a scorer to rollouts.

    Args:
        rollouts: Rollouts without this reward.
        name: Name of the reward.
        scorer: Judge of the rollouts.

    Returns:
        Copies with one more reward.

    Raises:
        DataError: A score is not finite, or scores are missing.
    """
    scores = scorer.score(rollouts)
    if len(scores) != len(rollouts):
        problem = f"are not {len(rollouts)}, one for each rollout"
        name = f"scores of {name}"
        raise DataError(Problem(name, len(scores), problem, "return all"))
    return [
        dataclasses.replace(rollout, rewards={**rollout.rewards, name: score})
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


def function_name(function: Callable[..., Any]) -> str:
    """Names a reward function so that another process can import it.

    Args:
        function: Function at the top of a module.

    Returns:
        `module:function`.

    Raises:
        ConfigError: The function is in no module that a process can import.

    Example:
        >>> function_name(math.fsum)
        'math:fsum'
    """
    module = getattr(function, "__module__", None)
    name = f"{module}:{getattr(function, '__qualname__', '')}"
    if module in (None, "__main__") or not is_function_name(name):
        problem = "is at the top of no module, which a process imports"
        remedy = "define it with `def` in a file, and import it"
        raise ConfigError(Problem("rewards", name, problem, remedy))
    return name


class RewardPool:
    """Processes that call reward functions, within a time limit.

    A function is called as `function(prompt, completion, **row)`: text of the prompt or
    messages, text of the completion, and the further fields of the prompt's record. The
    function returns a finite number, or None if there is no reward.

    A call that raises, ends the process, takes too long or returns something else has
    failed: the first failures of a step are logged, and the completion gets no reward
    by any function or judge before, as rewards by a part of them would mislead.

    Args:
        functions: Reward functions as `module:function`, which also names the reward.
        num_processes: Number of processes, 1 or more; None is one for each processor,
            8 at most.
        seconds: Maximum time of a call, above 0.

    Raises:
        ConfigError: A function cannot be imported, or a number is out of range.
        ProcessError: A process cannot be started.

    Example:
        >>> rollout = Rollout(
        ...     prompt=0, sample=0, given="3+9", prompt_ids=[5], ids=[7],
        ...     logprobs=[-0.5], finish_reason="stop", text="12", row={"answer": 12},
        ... )
        >>> with RewardPool(["zjax.rl.tasks.sums:reward"], num_processes=1) as pool:
        ...     [scored] = pool.score([rollout])
        >>> dict(scored.rewards)
        {'zjax.rl.tasks.sums:reward': 1.0}
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        num_processes: int | None = None,
        seconds: float = 10.0,
    ):
        number = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        number = number if num_processes is None else num_processes
        if problems := [*_problems(functions, number, seconds)]:
            raise ConfigError(*problems)
        self._names, self._seconds = [*functions], seconds
        self.failures: Mapping[str, int] = dict.fromkeys(functions, 0)
        with contextlib.ExitStack() as stack:
            self._processes = list[RewardProcess]()
            for _ in range(number):
                self._processes.append(RewardProcess(functions, seconds))
                stack.callback(lambda each: each.close(), self._processes[-1])
            while not all(each.is_idle for each in self._processes):
                collections.deque(self._wait(), maxlen=0)
            stack.pop_all()

    def __enter__(self) -> "RewardPool":
        """Returns the pool, whose processes end with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        self.close()

    def close(self) -> None:
        """Ends the processes, and their children."""
        for each in self._processes:
            each.close()

    def score(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Adds the rewards of all functions to the rollouts of a step.

        Rollouts are read as processes become free, so that a generator of rollouts goes
        on while functions run. `failures` then has the number of failed calls by
        function.

        Args:
            rollouts: Rollouts to score.

        Returns:
            Copies with rewards, in order.

        Raises:
            DataError: A function failed for every rollout.
        """
        taken, answers = list[Rollout](), dict[tuple[int, int], Answer]()
        try:
            for mark, message in self._calls(rollouts, taken):
                while not (idle := [x for x in self._processes if x.is_idle]):
                    answers |= self._wait()
                idle[0].call(mark, message)
            while not all(each.is_idle for each in self._processes):
                answers |= self._wait()
        except (
            BaseException
        ):  # pending answers would be taken for those of a later step
            self._restart()
            raise
        self._report(taken, answers)
        return [self._with_rewards(n, each, answers) for n, each in enumerate(taken)]

    def _calls(
        self, rollouts: Iterable[Rollout], taken: list[Rollout]
    ) -> Iterator[tuple[tuple[int, int], tuple[Any, ...]]]:
        """Yields the calls of each rollout, and adds the rollout to `taken`."""
        for place, rollout in enumerate(rollouts):
            taken.append(rollout)
            given = rollout.given, rollout.text, dict(rollout.row)
            for number in range(len(self._names)):
                yield (place, number), (number, *given)

    def _wait(self) -> dict[tuple[int, int], Answer]:
        """Waits for an answer or a deadline; returns the answers of ended calls."""
        busy = [each for each in self._processes if not each.is_idle]
        first = min(each.deadline for each in busy)
        ready = wait([x.connection for x in busy], max(first - time.monotonic(), 0))
        found = [each.receive() for each in busy if each.connection in ready]
        now = time.monotonic()
        late = [x for x in busy if not x.is_idle and x.connection not in ready]
        found += [each.expire() for each in late if now >= each.deadline]
        return dict(each for each in found if each is not None)

    def _restart(self) -> None:
        """Replaces the processes with a call that nobody waits for."""
        for each in self._processes:
            if not each.is_idle:
                each.close()
                each.start()

    def _report(
        self, rollouts: Sequence[Rollout], answers: Mapping[tuple[int, int], Answer]
    ) -> None:
        """Logs the first failures; raises if a function failed for all rollouts."""
        self.failures, problems = {}, []
        for number, name in enumerate(self._names):
            reasons = [answers[place, number][1] for place in range(len(rollouts))]
            failed = [place for place, reason in enumerate(reasons) if reason]
            self.failures |= {name: len(failed)}
            for place in failed[:NUM_TOLD]:
                logging.warning(
                    "reward %s failed for prompt %d (%.60r), sample %d: %s",
                    *(name, rollouts[place].prompt, rollouts[place].given),
                    *(rollouts[place].sample, reasons[place]),
                )
            if more := len(failed[NUM_TOLD:]):
                logging.warning("reward %s failed for %d more", name, more)
            if failed and len(failed) == len(rollouts):
                problem = f"failed for all {len(failed)} completions ({reasons[0]})"
                problems.append(Problem("rewards", name, problem, "mend it"))
        if problems:
            raise DataError(*problems)

    def _with_rewards(
        self, place: int, rollout: Rollout, answers: Mapping[tuple[int, int], Answer]
    ) -> Rollout:
        """Adds the rewards to a rollout; none where a function failed."""
        found = [answers[place, number] for number in range(len(self._names))]
        has_failed = any(reason for _, reason in found)
        rewards = [None if has_failed else reward for reward, _ in found]
        named = dict(zip(self._names, rewards, strict=True))
        earlier = dict.fromkeys(rollout.rewards) if has_failed else rollout.rewards
        return dataclasses.replace(rollout, rewards={**earlier, **named})


def _problems(
    functions: Sequence[str], num_processes: int, seconds: float
) -> Iterator[Problem]:
    """Yields functions that are no names, and numbers out of range."""
    if not functions:
        yield Problem("rewards", functions, "names no function", "name one or more")
    for name in functions:
        if not is_function_name(name):
            problem, remedy = "is not the name of a function", "use module:function"
            yield Problem("rewards", name, problem, remedy)
        elif functions.count(name) > 1:
            yield Problem("rewards", name, "is named twice", "name it once")
    if num_processes < 1:
        yield Problem("num_processes", num_processes, "is below 1", "use 1 or more")
    if not 0 < seconds < math.inf:
        yield Problem("seconds", seconds, "is not a number above 0", "use 10.0")
