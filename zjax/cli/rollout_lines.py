"""Lines of `zjax generate --rollouts`: texts as training reads them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from absl import flags

from zjax.cli.prompt_file import Prompt, Row
from zjax.config.flags import refuse_flags
from zjax.data.conversations import Conversation
from zjax.errors import ConfigError, Problem
from zjax.generation.generator import Text
from zjax.generation.sampling import Sampling
from zjax.rl.rollouts import Rollout, encode_line, line_checksum, sampling_problems


def rollout_sampling(given: flags.FlagValues, values: dict[str, Any]) -> Sampling:
    """Makes settings that draw from the whole distribution and return its logarithms.

    `--top_k` is 0 unless it was typed.
    """
    if not given.output:
        remedy = "name a file by --output"
        raise ConfigError(Problem("--rollouts", True, "writes no file", remedy))
    problem = "has no effect with --rollouts, whose lines have all that training reads"
    refuse_flags(given, ["num_logprobs", "prompt_logprobs"], problem)
    if not given["top_k"].present:
        values |= {"top_k": 0}
    if problems := sampling_problems(values):
        raise ConfigError(*problems)
    return Sampling(**values | {"num_logprobs": 0, "filtered_logprobs": True})


class RolloutLines:
    """Encodes texts in order, each line with the checksum of all lines so far.

    Args:
        rows: Fields of the record of each prompt of the call.
        sampling: How tokens are chosen.
        step: Number of optimizer steps of the weights.
        num_done: Number of prompts that an earlier call wrote.
        last_line: Last line that an earlier call wrote; empty for none.
    """

    def __init__(
        self,
        rows: Iterator[Row],
        sampling: Sampling,
        step: int,
        num_done: int,
        last_line: bytes,
    ):
        self._rows, self._step, self._num_done = rows, step, num_done
        self._sampling = dataclasses.asdict(sampling)
        self._checksum = line_checksum(last_line)

    def encode(self, prompt: Prompt, texts: list[Text]) -> Iterator[bytes]:
        """Yields the lines of the texts of the next prompt."""
        row = next(self._rows)
        is_talk = isinstance(prompt, Conversation)
        for text in texts:
            rollout = Rollout(
                prompt=self._num_done + text.prompt,
                sample=text.sample,
                given=[*prompt.messages] if is_talk else prompt,
                prompt_ids=text.prompt_ids,
                ids=text.ids,
                logprobs=text.logprobs or [],
                finish_reason=text.finish_reason,
                text=text.text,
                step=self._step,
                row=row,
                experts=text.experts,
                sampling=self._sampling,
            )
            line, self._checksum = encode_line(rollout, self._checksum)
            yield line
