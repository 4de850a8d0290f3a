"""Sampler: draws the texts of a rollout from the weights of a run."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from zjax.data.prompts import Prompts
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.generation.sizes import MAX_ROWS
from zjax.rl.prompts import PromptSet
from zjax.rl.rollouts import Rollout
from zjax.rl.stopping import Stopped, check, never
from zjax.sharding.mesh import BATCH_AXES, num_shares
from zjax.train.average import with_part


class Sampler:
    """Draws texts with log-probabilities, in memory that is free again afterwards.

    Args:
        run: `zjax.Run` of the policy.
        prompts: Tokenizer and chat template.
        max_length: Most tokens of a prompt with a text.
        sampling: Length and temperature of the texts.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        run: Any,
        prompts: Prompts,
        *,
        max_length: int,
        sampling: Sampling,
        seed: int,
    ):
        self._run, self._prompts, self._max_length = run, prompts, max_length
        self._sampling, self._seed = sampling, seed

    def draw(
        self,
        state: Any,
        prompts: PromptSet,
        numbers: Sequence[int],
        num_samples: int,
        *,
        step: int,
        part: str = "raw",
        stopped: Stopped = never,
    ) -> list[Rollout]:
        """Draws `num_samples` texts of each prompt.

        The draws depend on weights, seed and the numbers of prompts alone. The pages of
        keys, and the weights as passes read them, are freed before the return.

        Args:
            state: State of the run; not consumed.
            prompts: Prompts by number.
            numbers: Numbers of prompts, each of which begins a group.
            num_samples: Texts of a prompt.
            step: Number of optimizer steps of the weights.
            part: Weights to draw from; `raw` are the weights that learn.
            stopped: Function that is asked between passes whether to stop; in one
                process alone, as several have to run equal passes.

        Returns:
            The texts, by prompt and sample.

        Raises:
            RolloutStopped: The function said so; texts in flight are dropped.
        """
        check(stopped)
        given = [prompts.at(number) for number in numbers]
        num_texts = len(numbers) * num_samples
        num_shards = num_shares(self._run.mesh, BATCH_AXES)
        sampling = dataclasses.replace(self._sampling, num_samples=num_samples)
        with Generator(
            self._run,
            with_part(state, part),
            prompts=self._prompts,
            max_rows=min(MAX_ROWS, -(-num_texts // num_shards)),
            max_length=self._max_length,
        ) as generator:
            # Training routes the tokens to the experts that drew them.
            sampling = dataclasses.replace(sampling, experts=generator.has_experts)
            texts = generator.generate(
                [prompt.ids for prompt in given],
                sampling,
                seeds=[self._seed_of(number) for number in numbers],
                stopped=stopped,
            )
        check(stopped)
        described = {"temperature": sampling.temperature}
        return [
            Rollout(
                prompt=numbers[text.prompt],
                sample=text.sample,
                given=given[text.prompt].given,
                prompt_ids=given[text.prompt].ids,
                ids=np.asarray(text.ids, np.int32),
                logprobs=np.asarray(text.logprobs, np.float32),
                finish_reason=text.finish_reason,
                text=text.text,
                step=step,
                row=given[text.prompt].row,
                experts=text.experts,
                sampling=described,
            )
            for text in texts
        ]

    def _seed_of(self, number: int) -> int:
        """Seed of the draws of a prompt."""
        return zlib.crc32(f"{self._seed} {number}".encode())
