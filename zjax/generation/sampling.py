"""Sampling of tokens in one program, for rows with different settings."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from zjax.errors import ConfigError, Problem
from zjax.generation import logits as transforms
from zjax.typing import LogPartition, logsumexp
from zjax_kernels import find_best

MAX_END_IDS = 8
MAX_FORBIDDEN_IDS = 32
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
"""Least temperature that draws tokens."""


MAX_PENALTY = 1e20
"""Largest penalty: times any count, over any temperature, it is finite in float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens, and where its text ends.

    Logits pass through penalties, forbidden ids, temperature, `top_k`, `top_p` and
    `min_p`, in this order. A draw depends on the logits, on `seed`, on the number of
    the sample and on the number of tokens before the drawn token: not on other
    requests, nor on devices.

    Args:
        max_new_tokens: Largest number of tokens to write, 0 or more; 0 writes up to the
            longest text of the model, or nothing with `prompt_logprobs`.
        temperature: Divisor of the logits, 0 or 1e-5 and more; 0 takes the most likely
            token, without filters.
        top_k: Number of most likely tokens to draw from, 0 to the vocabulary; 0 is all.
        top_p: Probability mass of the most likely tokens to draw from, above 0 to 1.
        min_p: Least probability to draw, over the largest probability, 0 to 1.
        repetition_penalty: Divisor of positive logits, and factor of negative logits,
            of tokens in prompt or text; 1e-20 to 1e20, and 1 is none.
        presence_penalty: Subtracted from the logits of tokens in the text, -1e20 to
            1e20.
        frequency_penalty: Subtracted from a logit for each occurrence in the text,
            -1e20 to 1e20.
        forbidden_ids: Ids that are never chosen, 32 at most.
        min_new_tokens: Number of tokens before an end id may be chosen.
        num_samples: Number of texts for the prompt, 1 or more.
        seed: Seed of all draws, 0 to 2^32 - 1.
        end_ids: Ids that end the text, 8 at most; None takes the ids of the tokenizer.
        stop: Strings that end the text, which is cut before the string.
        num_logprobs: Number of most likely tokens that are returned with their
            log-probabilities at each position, 0 to 20, beside the chosen token; None
            returns no log-probabilities.
        filtered_logprobs: Whether log-probabilities are of the distribution that is
            drawn from, in place of the model's; without temperature and filters where
            the temperature is 0.
        prompt_logprobs: Number of most likely tokens, 0 to 20, to return at each place
            of the prompt beside the token there, all with log-probabilities by the
            model's distribution. None returns no scores of the prompt.
        experts: Whether the experts that each token chose are returned, of a model with
            experts.

    Raises:
        ConfigError: A setting is no number, no ids, or no texts.

    Example:
        >>> Sampling(top_p=0.9).problems(vocab_size=100)
        []
        >>> print(*Sampling(top_p=0.0).problems(vocab_size=100))
        top_p=0.0 is not above 0 and up to 1; use 1 for all

    Reference:
        Penalties: Keskar et al. (arXiv:1909.05858); presence and frequency as in the
        API of OpenAI. `top_p`: Holtzman et al. (arXiv:1904.09751). `min_p`: Nguyen et
        al. (arXiv:2407.01082).
    """

    max_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    forbidden_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    num_samples: int = 1
    seed: int = 0
    end_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None
    filtered_logprobs: bool = False
    prompt_logprobs: int | None = None
    experts: bool = False

    def __post_init__(self) -> None:
        # The thread of a generator would fail, and end the texts of all requests.
        if problems := [*_type_problems(self)]:
            raise ConfigError(*problems)

    @property
    def scores_alone(self) -> bool:
        """Whether the prompt is scored, and nothing is written."""
        return self.prompt_logprobs is not None and self.max_new_tokens == 0

    def problems(self, vocab_size: int) -> list[Problem]:
        """Finds the settings that cannot work with a vocabulary.

        Args:
            vocab_size: Number of tokens of the model.

        Returns:
            One problem for each setting at fault.
        """
        return [
            *_count_problems(self),
            *_filter_problems(self, vocab_size),
            *_penalty_problems(self),
            *_id_problems(self, vocab_size),
            *_output_problems(self, vocab_size),
        ]


_INTEGERS = "max_new_tokens", "top_k", "min_new_tokens", "num_samples", "seed"
_OPTIONAL_INTEGERS = "num_logprobs", "prompt_logprobs"
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _type_problems(sampling: Sampling) -> Iterator[Problem]:
    """Yields problems of settings that are no numbers, no ids, or no texts."""
    optional = [x for x in _OPTIONAL_INTEGERS if getattr(sampling, x) is not None]
    for name in (*_INTEGERS, *optional):
        value = getattr(sampling, name)
        if not isinstance(value, numbers.Integral):
            yield Problem(name, value, "is no integer", "use one, such as 1")
    for name in _NUMBERS:
        value = getattr(sampling, name)
        if not isinstance(value, numbers.Real):
            yield Problem(name, value, "is no number", "use one, such as 1.0")
    ids = {"forbidden_ids": sampling.forbidden_ids, "end_ids": sampling.end_ids or ()}
    for name, value in ids.items():
        if not _are(numbers.Integral, value):
            yield Problem(name, value, "are no ids", "use integers, or () for none")
    if not _are(str, sampling.stop) or isinstance(sampling.stop, str):
        problem = "is no tuple of texts with a character or more"
        yield Problem("stop", sampling.stop, problem, "use () for none")


def _are(kind: type, values: Any) -> bool:
    """Whether values are a sequence of a type."""
    is_sequence = isinstance(values, Sequence)
    return is_sequence and all(isinstance(each, kind) for each in values)


GREEDY = Sampling()
"""Takes the most likely token, up to the longest text of the model."""


def _count_problems(sampling: Sampling) -> Iterator[Problem]:
    """Yields problems of numbers of tokens and samples, and of the seed."""
    longest, least = sampling.max_new_tokens, sampling.min_new_tokens
    if longest < 0:
        remedy = "use 0 for all that the model can write"
        yield Problem("max_new_tokens", longest, "is negative", remedy)
    if least < 0:
        yield Problem("min_new_tokens", least, "is negative", "use 0 for none")
    if (longest > 0 or sampling.scores_alone) and longest < least:
        problem = f"is above max_new_tokens={longest}"
        yield Problem("min_new_tokens", least, problem, f"use at most {longest}")
    if sampling.num_samples < 1:
        yield Problem("num_samples", sampling.num_samples, "is below 1", "use 1")
    if sampling.num_samples > 1 and sampling.temperature == 0:
        problem = "would be equal texts at temperature=0.0"
        remedy = "use 1, or a temperature above 0"
        yield Problem("num_samples", sampling.num_samples, problem, remedy)
    elif sampling.num_samples > 1 and sampling.scores_alone:
        problem = f"would be empty texts at max_new_tokens={longest}"
        yield Problem("num_samples", sampling.num_samples, problem, "use 1")
    if not 0 <= sampling.seed < 2**32:
        remedy = "use 0 to 4294967295"
        yield Problem("seed", sampling.seed, "is no unsigned 32-bit number", remedy)


def _filter_problems(sampling: Sampling, vocab_size: int) -> Iterator[Problem]:
    """Yields problems of the temperature and of the filters."""
    temperature, top_k = sampling.temperature, sampling.top_k
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        problem = f"is neither 0 nor {MIN_TEMPERATURE} or more"
        if temperature == math.inf:
            problem = "is not finite"
        remedy = "use 0 for the most likely token, or 1 for the model's distribution"
        yield Problem("temperature", temperature, problem, remedy)
    if not 0 <= top_k <= vocab_size:
        problem = f"is not between 0 and model.vocab_size={vocab_size}"
        yield Problem("top_k", top_k, problem, "use 0 for all")
    if not 0 < sampling.top_p <= 1:
        problem = "is not above 0 and up to 1"
        yield Problem("top_p", sampling.top_p, problem, "use 1 for all")
    if not 0 <= sampling.min_p <= 1:
        problem = "is not between 0 and 1"
        yield Problem("min_p", sampling.min_p, problem, "use 0 for all")


def _penalty_problems(sampling: Sampling) -> Iterator[Problem]:
    """Yields problems of penalties."""
    most = MAX_PENALTY
    value = sampling.repetition_penalty
    if not 1 / most <= value <= most:
        problem = f"is not between {1 / most:g} and {most:g}"
        yield Problem("repetition_penalty", value, problem, "use 1 for none")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not -most <= value <= most:
            problem = f"is not between {-most:g} and {most:g}"
            yield Problem(name, value, problem, "use 0 for none")


def _id_problems(sampling: Sampling, vocab_size: int) -> Iterator[Problem]:
    """Yields problems of end ids and of forbidden ids."""
    end_ids = sampling.end_ids or ()
    for name, ids, most in (
        ("forbidden_ids", sampling.forbidden_ids, MAX_FORBIDDEN_IDS),
        ("end_ids", end_ids, MAX_END_IDS),
    ):
        wrong = [each for each in ids if not 0 <= each < vocab_size]
        if wrong:
            problem = f"has {wrong[0]}, which is no id of {vocab_size}"
            remedy = f"use 0 to {vocab_size - 1}, or () for none"
            yield Problem(name, ids, problem, remedy)
        if len(ids) > most:
            problem = f"has {len(ids)} ids"
            yield Problem(name, ids, problem, f"give at most {most}")
    excluded = {*sampling.forbidden_ids}
    excluded |= {*end_ids} if sampling.min_new_tokens else set()
    if len(excluded) >= vocab_size:
        problem, remedy = "leaves no token to choose", "forbid fewer"
        yield Problem("forbidden_ids", sampling.forbidden_ids, problem, remedy)


def _output_problems(sampling: Sampling, vocab_size: int) -> Iterator[Problem]:
    """Yields problems of stop strings and of log-probabilities."""
    if "" in sampling.stop:
        problem = "is no tuple of texts with a character or more"
        yield Problem("stop", sampling.stop, problem, "use () for none")
    most = min(MAX_LOGPROBS, vocab_size)
    for name in _OPTIONAL_INTEGERS:
        number = getattr(sampling, name)
        if number is not None and not 0 <= number <= most:
            problem = f"is not between 0 and {most}"
            remedy = "use None for no log-probabilities"
            yield Problem(name, number, problem, remedy)


class SamplingRows(NamedTuple):
    """Settings of `Sampling` for each row of a program, NumPy or JAX arrays."""

    temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    repetition_penalty: Float32[Array, " R"]
    presence_penalty: Float32[Array, " R"]
    frequency_penalty: Float32[Array, " R"]
    forbidden_ids: Int32[Array, "R F"]
    """Padded by -1."""
    min_new_tokens: Int32[Array, " R"]
    end_ids: Int32[Array, "R E"]
    """Padded by -1."""
    seed: UInt32[Array, " R"]
    sample: Int32[Array, " R"]
    """Number of the row among the samples of a request, from 0."""
    filtered_logprobs: Bool[Array, " R"]
    num_logprobs: Int32[Array, " R"]
    """Most likely tokens that the request asks for; -1 for no log-probabilities."""


def rows_of(
    samplings: Sequence[Sampling | None],
    samples: Sequence[int] | None = None,
    *,
    end_ids: Sequence[int] = (),
) -> SamplingRows:
    """Lays the settings of requests into NumPy arrays.

    `samplings` has one entry for each row, None where a row is free; `samples` has the
    number of each row among the samples of its request, None where all are 0.
    `end_ids` are the ids of the tokenizer. The shapes depend on the number of rows and
    of `end_ids` alone.
    """
    samples = [0] * len(samplings) if samples is None else samples
    chosen = [GREEDY if each is None else each for each in samplings]
    values: dict[str, Any] = {"sample": np.array(samples, np.int32)}
    for name, dtype in _DTYPES.items():
        values[name] = np.array([getattr(each, name) for each in chosen], dtype)
    wanted = [-1 if x.num_logprobs is None else x.num_logprobs for x in chosen]
    values["num_logprobs"] = np.array(wanted, np.int32)
    forbidden = [each.forbidden_ids for each in chosen]
    values["forbidden_ids"] = _pad(forbidden, MAX_FORBIDDEN_IDS)
    ends = [end_ids if each.end_ids is None else each.end_ids for each in chosen]
    values["end_ids"] = _pad(ends, max(MAX_END_IDS, len(end_ids)))
    return SamplingRows(**values)


_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "min_new_tokens": np.int32,
    "seed": np.uint32,
    "filtered_logprobs": np.bool_,
}
"""Settings that are one number of each row."""


def _pad(lists: Sequence[Sequence[int]], width: int) -> Int32[np.ndarray, "R N"]:
    """Lays lists of ids into rows, padded by -1."""
    padded = np.full((len(lists), width), -1, np.int32)
    for row, ids in enumerate(lists):
        padded[row, : len(ids)] = ids
    return padded


class Logprobs(NamedTuple):
    """Natural log-probabilities of T tokens of C chunks, and the most likely tokens.

    Arrays of NumPy or JAX. The most likely tokens that a chunk does not ask for have
    log-probability 0.
    """

    logprobs: Float32[Any, "*C T"]
    best_ids: Int32[Any, "*C T N"]
    """Most likely tokens, the best first."""
    best_logprobs: Float32[Any, "*C T N"]


class Chosen(NamedTuple):
    """Chosen tokens of R rows, at one position or several, with log-probabilities.

    Logarithms are natural. Log-probabilities are 0 where no row asks for some, and so
    are the most likely tokens that a row does not ask for.
    """

    tokens: Int32[Array, "*T R"]
    logprobs: Float32[Array, "*T R"]
    best_ids: Int32[Array, "*T R N"]
    """Most likely tokens, the best first."""
    best_logprobs: Float32[Array, "*T R N"]
    prompt: Logprobs | None = None
    """Of the token behind each token of a chunk; None in passes that score none."""
    experts: tuple[Any, ...] | None = None
    """Of the T tokens that C lanes, and C chunks, read in each of S steps, best first:
    uint8 or int16 [S, C, T, layers with experts, experts of a token]; None in passes
    that return none."""


def choose_tokens(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    history: Int[Array, "R S"],
    prompt_lengths: Int[Array, " R"],
    lengths: Int[Array, " R"],
    *,
    num_best: int = 0,
    log_partition: LogPartition = logsumexp,
) -> Chosen:
    """Chooses the next token of each row.

    `history` has prompt and text from column 0 on, `lengths` tokens of which
    `prompt_lengths` are the prompt; later columns are not read. `num_best` is static,
    the number of tokens in `Chosen.best_ids`. All rows have log-probabilities if a row
    asks for some, and zeros else. `log_partition` maps scores to the logarithm of the
    sum of exponentials.

    A row draws with `fold_in(fold_in(key(seed), sample), length)`, so that a draw is
    the same at another row, beside other rows, and on other devices.
    """
    raw = logits.astype(jnp.float32)
    known = history, prompt_lengths, lengths

    def choose(raw):
        return _choose_as_asked(raw, rows, known, num_best, log_partition)

    def choose_greedily(raw):
        best = raw.shape[0], num_best
        return Chosen(
            tokens=jnp.argmax(raw, axis=1).astype(jnp.int32),
            logprobs=jnp.zeros(raw.shape[0], jnp.float32),
            best_ids=jnp.zeros(best, jnp.int32),
            best_logprobs=jnp.zeros(best, jnp.float32),
        )

    # One choice for rows of which none asks for more: each of the choices below costs a
    # GPU some 20 us, of the 4 ms of a token of 7B parameters.
    return jax.lax.cond(_asks_for_more(rows).any(), choose, choose_greedily, raw)


def _asks_for_more(rows: SamplingRows) -> Bool[Array, " R"]:
    """Whether a row asks for more than the most likely token."""
    return (
        (rows.temperature > 0)
        | (rows.num_logprobs >= 0)
        | (rows.repetition_penalty != 1)
        | (rows.presence_penalty != 0)
        | (rows.frequency_penalty != 0)
        | (rows.min_new_tokens > 0)
        | (rows.forbidden_ids >= 0).any(1)
    )


def _choose_as_asked(raw, rows, known, num_best, log_partition):
    """Chooses tokens as `choose_tokens` does, whatever rows ask for."""
    history, prompt_lengths, lengths = known
    allowed = restrict(raw, rows, history, prompt_lengths, lengths)

    def finish(tokens, scores, raw):
        scores = jnp.where(rows.filtered_logprobs[:, None], scores, raw)
        how = {"num_best": num_best, "log_partition": log_partition}
        return Chosen(tokens, *find_logprobs(scores, tokens, rows.num_logprobs, **how))

    def take(allowed, raw):
        return finish(jnp.argmax(allowed, axis=1).astype(jnp.int32), allowed, raw)

    def draw(allowed, raw):
        scores = filter_logits(allowed, rows)
        tokens = _draw(scores, rows, lengths)
        best = jnp.argmax(allowed, axis=1).astype(jnp.int32)
        return finish(jnp.where(rows.temperature > 0, tokens, best), scores, raw)

    # A batch of greedy rows needs neither filters nor random numbers. Scores of all
    # tokens stay in a branch, which would have to copy them to whoever is behind.
    return jax.lax.cond((rows.temperature > 0).any(), draw, take, allowed, raw)


def find_logprobs(
    scores: Float32[Array, "R V"],
    tokens: Int[Array, " R"],
    num_asked: Int[Array, " R"],
    *,
    num_best: int,
    log_partition: LogPartition = logsumexp,
) -> Logprobs:
    """Returns log-probabilities of a token of each row and of the most likely tokens.

    A row asks for `num_asked` of `num_best` most likely tokens, or with -1 for nothing.
    All log-probabilities are 0 where no row asks.
    """

    def describe(scores, tokens):
        norms = log_partition(scores)
        logprobs = jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0] - norms
        return logprobs, *or_zeros(num_asked > 0, rank, scores, norms)

    def rank(scores, norms):
        best, best_ids = find_best(scores, num_best, num_asked)
        places = jnp.arange(num_best, dtype=jnp.int32)[None]
        is_asked = places < num_asked[:, None]
        return best_ids, jnp.where(is_asked, best - norms[:, None], 0)

    return Logprobs(*or_zeros(num_asked >= 0, describe, scores, tokens))


def or_zeros(asks, compute, *inputs):
    """Computes arrays if a row asks for them; else returns zeros in their form."""

    def zeros(*inputs):
        shapes = jax.eval_shape(compute, *inputs)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.lax.cond(asks.any(), compute, zeros, *inputs)


def restrict(
    logits: Float32[Array, "R V"],
    rows: SamplingRows,
    history: Int[Array, "R S"],
    prompt_lengths: Int[Array, " R"],
    lengths: Int[Array, " R"],
) -> Float32[Array, "R V"]:
    """Applies penalties, and forbids ids."""
    count = functools.partial(
        transforms.count_tokens, ends=lengths, vocab_size=logits.shape[1]
    )

    def penalise_repetition(logits):
        counts = count(history, firsts=jnp.zeros_like(lengths))
        return transforms.penalise_repetition(logits, counts, rows.repetition_penalty)

    def penalise_counts(logits):
        counts = count(history, firsts=prompt_lengths)
        penalties = rows.presence_penalty, rows.frequency_penalty
        return transforms.penalise_counts(logits, counts, *penalties)

    logits = _if_any(rows.repetition_penalty != 1, penalise_repetition, logits)
    asks = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    logits = _if_any(asks, penalise_counts, logits)
    is_short = lengths - prompt_lengths < rows.min_new_tokens
    ends = jnp.where(is_short[:, None], rows.end_ids, -1)
    ids = jnp.concatenate([rows.forbidden_ids, ends], axis=1)
    # Of settings alone: a program of several positions could not skip it otherwise.
    asks = (rows.forbidden_ids >= 0).any(1) | (rows.min_new_tokens > 0)
    return _if_any(asks, transforms.forbid, logits, ids)


def filter_logits(
    logits: Float32[Array, "R V"], rows: SamplingRows
) -> Float32[Array, "R V"]:
    """Applies temperature and filters to the rows that draw."""
    draws = rows.temperature > 0
    scores = transforms.scale(logits, jnp.where(draws, rows.temperature, 1))
    for transform, setting, asks in (
        (transforms.keep_top_k, rows.top_k, rows.top_k > 0),
        (transforms.keep_top_p, rows.top_p, rows.top_p < 1),
        (transforms.keep_min_p, rows.min_p, rows.min_p > 0),
    ):
        scores = _if_any(asks & draws, transform, scores, setting)
    return jnp.where(draws[:, None], scores, logits)


def _if_any(asks, transform, logits, *settings):
    """Transforms logits if a row asks for it, at no cost if none does."""

    def skip(logits, *_):
        return logits

    return jax.lax.cond(asks.any(), transform, skip, logits, *settings)


def _draw(scores, rows, lengths):
    """Draws a token of each row from scores, by Gumbel noise of the row's key."""

    def noise(seed, sample, length):
        # The default of a user may draw a row by its neighbours.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), length)
        # Common noise has steps that a large vocabulary would notice.
        return jax.random.gumbel(key, scores.shape[1:], jnp.float32, mode="high")

    noises = jax.vmap(noise)(rows.seed, rows.sample, lengths)
    return jnp.argmax(scores + noises, axis=1).astype(jnp.int32)
