"""Texts and answers of a run: prompts in, tokens through the decoder, text out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zjax.data.prompts import Given, as_talk, describe_prompt, make_prompts
from zjax.errors import ConfigError, Problem
from zjax.generation.prompts import longest_text
from zjax.settings.schema import Config
from zjax.train.state import TrainState


class Writer:
    """Continues texts and answers messages with the decoder of a run."""

    def __init__(
        self, config: Config, generate: Callable[..., jax.Array], *, writes_text: bool
    ):
        self._shape, self._generate = config.model, generate
        self._writes_text = writes_text
        text = config.data, config.model.vocab_size
        self._prompts = functools.cache(functools.partial(make_prompts, *text))

    def generate(
        self,
        state: TrainState,
        prompt: str | Sequence[int] | np.ndarray,
        *,
        messages: Any,
        chat: str,
        special_tokens: bool,
        max_new_tokens: int,
        seed: int,
        **sampling: Any,
    ) -> str:
        """Continues a prompt, or answers messages; see `Trainer.generate`."""
        if messages is not None and len(prompt):
            problem, remedy = "are given beside a prompt", "give one of them"
            raise ConfigError(Problem("messages", "...", problem, remedy))
        given = prompt if messages is None else as_talk(messages)
        [ids] = self.encode([given], chat=chat, special_tokens=special_tokens)
        prompts, row = self._prompts(chat), self._shape.max_length
        end = row if len(ids) < row else longest_text(self._shape)[1]
        out = self._generate(
            state,
            ids[None],
            max_new_tokens=max_new_tokens or end - len(ids),
            key=jax.random.key(seed),
            end_ids=prompts.tokenizer.end_ids,
            **sampling,
        )
        text = prompts.decode(ids, jax.device_get(out)[0, len(ids) :])
        return given + text if isinstance(given, str) else text

    def encode(
        self, given: Sequence[Given], *, chat: str, special_tokens: bool
    ) -> list[np.ndarray]:
        """Encodes prompts; one error names all unusable prompts."""
        most = longest_text(self._shape)[1] - 1
        remedy = f"use 1 to {most}, with the built-in decoder"
        prompts = self._prompts(chat)
        encoded = [prompts.encode(x, special_tokens=special_tokens) for x in given]
        problems = [
            Problem("prompt", describe_prompt(prompt), f"is {len(ids)} tokens", remedy)
            for prompt, ids in zip(given, encoded, strict=True)
            if not self._writes_text or not 0 < len(ids) <= most
        ]
        if problems:
            raise ConfigError(*problems)
        return encoded
