"""Prompts in arrays: checks before anything is compiled, and rows without padding."""

from collections.abc import Iterator, Sized
from typing import Any

import jax
import jax.core as jax_core
import numpy as np
from jax.experimental import multihost_utils

from zjax.data.entries import check_batch
from zjax.data.prompts import Given, describe_prompt
from zjax.errors import ConfigError, Problem
from zjax.generation.sampling import Sampling
from zjax.settings import schema
from zjax.settings.mixture import sees_future
from zjax.settings.ranges import MAX_TOKENS
from zjax.typing import Entry


def read_prompts(
    config: schema.Model,
    tokens: Any,
    lengths: Any,
    sampling: Sampling,
    key: jax.Array | None,
) -> list[np.ndarray]:
    """Returns int32 tokens of each prompt, or refuses prompts and settings.

    Prompts are padded on the left; `lengths` counts tokens without padding.
    """
    tokens, lengths = _to_host("tokens", tokens), _to_host("lengths", lengths)
    problems = [
        *_length_problems(config, tokens, lengths, sampling.max_new_tokens),
        *_key_problems(sampling, key),
        *sampling.problems(config.vocab_size),
        *model_problems(config),
    ]
    if problems:
        raise ConfigError(*problems)
    num_padded = np.zeros(len(tokens), int)
    if lengths is not None:
        num_padded = tokens.shape[1] - lengths
        # Padding may be any integer, which must not count as an id.
        is_padding = np.arange(tokens.shape[1]) < num_padded[:, None]
        tokens = np.where(is_padding, 0, tokens)
    entry = Entry(("B", "L"), np.integer, num_ids=config.vocab_size)
    check_batch({"tokens": tokens}, {"tokens": entry}, name="prompt")
    pairs = zip(tokens, num_padded, strict=True)
    return [row[first:].astype(np.int32) for row, first in pairs]


def _to_host(name: str, x: Any) -> Any:
    """Returns an array of all processes as a NumPy array; None stays."""
    if x is None:
        return None
    if isinstance(x, jax_core.Tracer):
        problem, remedy = "cannot be read in a program", "generate outside of jax.jit"
        raise ConfigError(Problem(name, "traced", problem, remedy))
    if not getattr(x, "is_fully_addressable", True):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _length_problems(
    config: schema.Model, tokens: np.ndarray, lengths: np.ndarray | None, num_new: int
) -> Iterator[Problem]:
    """Yields problems of the numbers of prompt tokens and new tokens."""
    if tokens.ndim != 2 or 0 in tokens.shape:
        remedy = "give int[B, L], each row one token or more"
        yield Problem("tokens", str([*tokens.shape]), "are no prompts", remedy)
        return
    num_rows, length = tokens.shape
    if num_new < 1:
        yield Problem("max_new_tokens", num_new, "is below 1", "ask for 1 or more")
    if num_new > MAX_TOKENS:
        problem, remedy = "is more than any run holds", f"use at most {MAX_TOKENS}"
        yield Problem("max_new_tokens", num_new, problem, remedy)
    field, longest = longest_text(config)
    free = longest - length
    if num_new > free:
        problem = f"leaves model.{field}={longest} after {length}"
        remedy = f"ask for {max(free, 0)} or fewer, or shorten the prompt"
        yield Problem("max_new_tokens", num_new, problem, remedy)
    if lengths is None:
        return
    if not np.issubdtype(lengths.dtype, np.integer):
        yield Problem("lengths", str(lengths.dtype), "are no integers", "give int[B]")
    elif lengths.shape != (num_rows,):
        problem = f"are not the lengths of {num_rows} prompts"
        yield Problem("lengths", str([*lengths.shape]), problem, "give one to each")
    elif wrong := [x for x in lengths.tolist() if not 1 <= x <= length]:
        problem = f"is not between 1 and the {length} columns of tokens"
        remedy = "count the tokens of each prompt, without its padding"
        yield Problem("lengths", wrong[0], problem, remedy)


def _key_problems(sampling: Sampling, key: jax.Array | None) -> Iterator[Problem]:
    """Yields the problem of draws without a key."""
    if sampling.temperature > 0 and key is None:
        problem = f"is missing and temperature={sampling.temperature} draws tokens"
        yield Problem("key", key, problem, "pass jax.random.key(0)")


def model_problems(config: schema.Model) -> Iterator[Problem]:
    """Yields reasons why a model cannot write text."""
    if sees_future(config):
        problem = "chooses tokens by comparison with later ones, which are not written"
        remedy = "generate with a model of moe='token_choice'"
        yield Problem("model.moe", "expert_choice", problem, remedy)


def longest_text(config: schema.Model) -> tuple[str, int]:
    """Returns name and value of the setting that bounds prompt and continuation.

    Rotary positions go on beyond the rows of training, up to the positions that the
    model is made for, which `dynamic` scaling multiplies; tables of learned positions
    and of sparse blocks end with the rows.
    """
    row = "max_length", config.max_length
    positions = config.positions
    is_sparse = isinstance(config.attention, schema.Sparse)
    if is_sparse or not isinstance(positions, schema.Rotary):
        return row
    scaling, longest = positions.scaling, positions.max_positions
    name = "positions.max_positions"
    if isinstance(scaling, schema.DynamicRope):
        name += " * model.positions.scaling.factor"
        longest = int(longest * scaling.factor)
    return (name, longest) if longest > config.max_length else row


def prompt_problems(
    prompt: Given, ids: Sized, longest: int, *, num_new: int = 1
) -> Iterator[Problem]:
    """Yields the problem of a prompt that is empty, or too long for new tokens."""
    if not len(ids):
        problem, remedy = "has no token", "give one token or more"
        yield Problem("prompt", describe_prompt(prompt), problem, remedy)
    elif len(ids) + num_new > longest:
        problem = f"has {len(ids)} tokens, and prompt and text together have at "
        problem += f"most {longest}"
        yield Problem("prompt", describe_prompt(prompt), problem, "shorten it")


def salt_of(config: schema.Model, num_given: int, num_new: int) -> bytes:
    """Names what the keys of a text depend on besides the tokens before.

    Some scalings rotate all tokens by the length of the text. Texts of equal salt, with
    `num_given` tokens in the prompt and `num_new` to come, may share pages.

    Example:
        >>> scaling = schema.DynamicRope(factor=2.0, original_length=8)
        >>> model = schema.Model(positions=schema.Rotary(scaling=scaling))
        >>> [salt_of(model, number, 4) for number in (3, 8, 9)]
        [b'8', b'8', b'9']
    """
    positions = config.positions
    scaling = positions.scaling if isinstance(positions, schema.Rotary) else None
    match scaling:
        case schema.DynamicRope():
            return b"%d" % max(num_given, scaling.original_length)
        case schema.Longrope():
            return b"%d" % (num_given + num_new > scaling.original_length)
    return b""
