"""Runs tasks of the Language Model Evaluation Harness (`lm_eval`) on a trained decoder.

Reference: Gao et al., A framework for few-shot language model evaluation, 2021.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zjax.data.prompts import as_talk, make_prompts
from zjax.errors import ConfigError, Problem, check_installed
from zjax.generation.generator import Generator
from zjax.generation.prompts import longest_text
from zjax.generation.sampling import Sampling
from zjax.models.inspect import log_likelihood
from zjax.run.trainer import Trainer
from zjax.train.average import with_part

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, and token ids of the continuation."""
_MAX_ROWS = 64
"""Most texts that are written at once."""
_SHORTEST = 16
"""Least padded length of a row; longer rows are padded to a power of two."""
_MAX_NEW_TOKENS = 256
"""Number of new tokens if a task sets no limit."""


class Continued(NamedTuple):
    """A text to continue greedily."""

    context: str
    until: Sequence[str] = ()
    """Strings, of which the first that comes ends the text."""
    max_new_tokens: int = _MAX_NEW_TOKENS


def evaluate_with_harness(
    trainer: Trainer,
    tasks: Sequence[Any],
    *,
    part: str = "auto",
    num_rows: int = 8,
    **settings: Any,
) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness on the built-in decoder of a run.

    Args:
        trainer: Trainer, as restored from a checkpoint.
        tasks: Names of tasks, or task objects of `lm_eval.simple_evaluate`.
        part: Kind of weights, as for `Trainer.evaluate`.
        num_rows: Number of rows scored at a time, 1 or more, on every device.
        settings: Further arguments of `lm_eval.simple_evaluate`, such as `limit=100`.

    Returns:
        The result of `lm_eval.simple_evaluate`: scores by task under `results`.

    Raises:
        PackageError: lm_eval is not installed.
        ConfigError: The run has no decoder or no such weights.
    """
    check_installed("lm_eval")
    # An optional package: importing it above would require it for all commands.
    import lm_eval  # pyright: ignore[reportMissingImports]

    model = _make_model(Scorer(trainer, part=part, num_rows=num_rows))
    return lm_eval.simple_evaluate(model=model, tasks=[*tasks], **settings)


class Scorer:
    """Computes log-probabilities and continuations of texts by the decoder of a run.

    Raises:
        ConfigError: The run has no decoder, or no such weights.
    """

    def __init__(self, trainer: Trainer, *, part: str = "auto", num_rows: int = 8):
        config, stack = trainer.config, trainer.run.model.stack
        kind = config.model.kind
        if kind != "decoder" or stack is None or stack.continuation is None:
            problem, remedy = "writes no text", "give a run of the built-in decoder"
            raise ConfigError(Problem("model.kind", kind, problem, remedy))
        self._bound, self.max_length = longest_text(config.model)
        self.prompts = make_prompts(config.data, config.model.vocab_size)
        self.tokenizer = self.prompts.tokenizer
        self._has_template = False
        self._run, self._num_rows = trainer.run, num_rows
        self._state = with_part(trainer.state, part)
        self._model = trainer.run.bind(self._state)

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Natural log-probability of each continuation, and whether it is greedy.

        A context has one token or more, and loses first tokens where a row exceeds
        `max_length`, which is `max_positions` of rotary positions.
        """
        longest = max((len(continuation) for _, continuation in rows), default=0)
        if longest > self.max_length:
            remedy = "score it in windows"
            bound = f"model.{self._bound}={self.max_length}"
            problem = f"has {longest} tokens, more than {bound}"
            raise ConfigError(Problem("continuation", "...", problem, remedy))
        # Longest first, so that rows of one batch need similar padding.
        order = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for start in range(0, len(rows), self._num_rows):
            chosen = order[start : start + self._num_rows]
            results = self._score([rows[index] for index in chosen])
            for index, result in zip(chosen, results, strict=True):
                found[index] = result
        return found

    @property
    def prefix_id(self) -> int:
        """Token before a text without context: BOS, or the token that ends texts."""
        bos = self.tokenizer.bos_id
        return self.tokenizer.end_id if bos is None else bos

    def encode_pair(self, context: str, continuation: str) -> Row:
        """Encodes a context, and the continuation by the tokens of both texts together.

        `prefix_id` replaces a context that is empty or all spaces.
        """
        start = context.rstrip()
        if not start:
            return [self.prefix_id], self.encode_inner(context + continuation)
        # Spaces at the end of a context belong to the next token in most vocabularies.
        whole, before = (self._encode(x) for x in (context + continuation, start))
        return before, whole[len(before) :]

    def encode_inner(self, text: str) -> list[int]:
        """Encodes a text without BOS."""
        return self.tokenizer.encode_texts([text], self._has_template)[0].tolist()

    def render(self, messages: Sequence[Any], *, asks: bool) -> str:
        """Renders messages by the chat template of the data, for later contexts.

        From then on, names of special tokens in texts are encoded as special tokens.
        `asks` appends the prompt for an answer.
        """
        self._has_template = True
        return self.prompts.chat.text_of(as_talk(messages), asks=asks)

    def _encode(self, text: str) -> list[int]:
        """Encodes a text with BOS, as a rendered template if there is one."""
        special_tokens = self._has_template
        return self.tokenizer.encode(text, special_tokens=special_tokens).tolist()

    def continue_texts(self, requests: Sequence[Continued]) -> list[str]:
        """Continues texts greedily, all with one cut of the weights.

        Contexts that are too long lose first tokens; `prefix_id` replaces an empty
        context.
        """
        by_sampling = dict[Sampling, list[int]]()
        for index, request in enumerate(requests):
            number = min(request.max_new_tokens, self.max_length - 1)
            stop = tuple(mark for mark in request.until if mark)
            sampling = Sampling(max_new_tokens=number, stop=stop)
            by_sampling.setdefault(sampling, []).append(index)
        found = [""] * len(requests)
        if not requests:
            return found
        form = {"prompts": self.prompts, "max_rows": min(len(requests), _MAX_ROWS)}
        with Generator(self._run, self._state, **form) as generator:
            for sampling, numbers in by_sampling.items():
                size = self.max_length - sampling.max_new_tokens
                contexts = [self._encode(requests[x].context) for x in numbers]
                prompts = [(ids or [self.prefix_id])[-size:] for ids in contexts]
                texts = generator.generate(prompts, sampling)
                for index, text in zip(numbers, texts, strict=True):
                    found[index] = text.text
        return found

    def _score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Scores one batch of at most `num_rows` rows, padded on the right."""
        # The last token is a target only.
        most = self.max_length + 1
        texts = [[*context, *wanted][-most:] for context, wanted in rows]
        longest = max(len(text) for text in texts) - 1
        shape = self._num_rows, min(_padded(longest), self.max_length)
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        counts = np.zeros(shape, bool)
        for row, (text, (_, wanted)) in enumerate(zip(texts, rows, strict=True)):
            size = len(text) - 1
            tokens[row, :size], targets[row, :size] = text[:-1], text[1:]
            counts[row, size - len(wanted) : size] = True
        found = log_likelihood(
            self._model, *map(jnp.asarray, (tokens, targets, counts))
        )
        sums, greedy = jax.device_get(found)
        pairs = zip(sums.tolist(), greedy.tolist(), strict=True)
        # Rows up to `num_rows` are padding, which keeps one compiled shape.
        return [*pairs][: len(rows)]


def _padded(length: int) -> int:
    """Padded length of a row: a power of two, so that few shapes are compiled."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _make_model(scorer: Scorer) -> Any:
    """Wraps a scorer as a model of lm_eval."""
    from lm_eval import utils  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class Model(LM):
        """A `Scorer` under the method names of lm_eval."""

        tokenizer_name = scorer.tokenizer.name

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return scorer.render(chat_history, asks=add_generation_prompt)

        def loglikelihood(self, requests, disable_tqdm=False):
            rows = [scorer.encode_pair(*request.args) for request in requests]
            return scorer.score(rows)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return [self._rolling(*request.args) for request in requests]

        def _rolling(self, text):
            windows = utils.get_rolling_token_windows(
                token_list=scorer.encode_inner(text),
                prefix_token=scorer.prefix_id,
                max_seq_len=scorer.max_length,
                context_len=1,
            )
            rows = [utils.make_disjoint_window(window) for window in windows]
            return sum(found for found, _ in scorer.score(rows))

        def generate_until(self, requests, disable_tqdm=False):
            wanted = [_read_request(*request.args) for request in requests]
            return scorer.continue_texts(wanted)

    return Model()


def _read_request(context: str, settings: Mapping[str, Any]) -> Continued:
    """Reads a text to continue, or refuses settings that are not greedy."""
    if settings.get("do_sample") and settings.get("temperature", 1.0):
        problem, remedy = "is not supported", "use a greedy task"
        raise ConfigError(Problem("do_sample", True, problem, remedy))
    until = settings.get("until") or []
    return Continued(
        context,
        (until,) if isinstance(until, str) else tuple(until),
        settings.get("max_gen_toks", _MAX_NEW_TOKENS),
    )
