"""Texts and answers of a run: prompts in, tokens through the decoder, text out."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from zjax.data.prompts import Given, as_talk, make_prompts
from zjax.errors import ConfigError, Problem
from zjax.generation.generator import Generator
from zjax.generation.prompts import longest_text, prompt_problems
from zjax.generation.sampling import Sampling
from zjax.generation.sizes import pages_of
from zjax.settings.attention import window_of_layers
from zjax.settings.schema import Config
from zjax.train.state import TrainState


class Writer:
    """Continues texts and answers messages with the decoder of a run.

    Args:
        config: Settings of the run.
        run: `zjax.Run`.
        writes_text: Whether the model is the decoder of the settings.
    """

    def __init__(self, config: Config, run: Any, *, writes_text: bool):
        self._shape, self._run = config.model, run
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
        **sampling: Any,
    ) -> str:
        """Continues a prompt, or answers messages; see `Trainer.generate`."""
        if messages is not None and len(prompt):
            problem, remedy = "are given beside a prompt", "give one of them"
            raise ConfigError(Problem("messages", "...", problem, remedy))
        given = prompt if messages is None else as_talk(messages)
        [ids] = self.encode([given], chat=chat, special_tokens=special_tokens)
        longest, row = longest_text(self._shape)[1], self._shape.max_length
        room = (row if len(ids) < row else longest) - len(ids)
        chosen = Sampling(max_new_tokens=max_new_tokens or room, **sampling)
        num_tokens = min(len(ids) + chosen.max_new_tokens, longest)
        num_pages = pages_of(1, num_tokens, window_of_layers(self._shape))
        form = {"prompts": self._prompts(chat), "max_rows": 1, "num_pages": num_pages}
        with Generator(self._run, state, **form) as generator:
            [text] = generator.generate([ids], chosen)
        return given + text.text if isinstance(given, str) else text.text

    def encode(
        self, given: Sequence[Given], *, chat: str, special_tokens: bool
    ) -> list[np.ndarray]:
        """Encodes prompts; one error names all unusable prompts."""
        if not self._writes_text:
            problem, remedy = "writes no text", "use the built-in decoder"
            raise ConfigError(Problem("model", "given", problem, remedy))
        longest, prompts = longest_text(self._shape)[1], self._prompts(chat)
        encoded = [prompts.encode(x, special_tokens=special_tokens) for x in given]
        problems = [
            problem
            for pair in zip(given, encoded, strict=True)
            for problem in prompt_problems(*pair, longest)
        ]
        if problems:
            raise ConfigError(*problems)
        return encoded
