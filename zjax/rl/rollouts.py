"""Rollouts: completions with the log-probabilities of the pass that drew them.

A file has a line of JSON for each rollout, which ends with the CRC-32 of all bytes
before it: a line that was changed, lost, moved or cut off is refused.
"""

import base64
import dataclasses
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import numpy as np

from zjax.errors import DataError, Problem, find_fault
from zjax.files import new_file, parse_json, writing

MAX_LINE_BYTES = 1 << 28
"""Most bytes of a line, with the experts of long texts."""
FINISH_REASONS = ("stop", "length", "abort")
_GIVEN = ("prompt", "completion")
"""Arguments of a reward function besides the fields of the row."""
EXPERT_DTYPES = ("uint8", "int16")
_PLAIN = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "forbidden_ids": (),
    "min_new_tokens": 0,
}
"""Settings of `Sampling` that change the distribution of tokens, at no effect."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """A completion that a model drew, and what was known when the model drew it.

    Args:
        prompt: Number of the group, unique in a run: the place of the prompt in the
            order of prompts, 0 or more.
        sample: Number of the completion within the group, 0 or more.
        given: Text of the prompt, or the messages of a conversation.
        prompt_ids: Tokens of the prompt, int32[m] with m of 1 or more.
        ids: Tokens of the completion with the end token, int32[n] with n of 1 or more.
        logprobs: Natural logarithm of the probability of each token of the completion,
            float32[n], by the distribution that the token was drawn from: softmax of
            logits over temperature, of the pass that drew the token.
        finish_reason: `stop`, `length` or `abort`.
        text: Text of the completion.
        step: Number of optimizer steps of the weights that drew the completion.
        row: Further fields of the record of the prompt, as values of JSON.
        rewards: Reward by each reward function, before weights; None where a function
            has no reward for the completion.
        sampling: Settings of `zjax.Sampling` that drew the completion; no filter and no
            penalty may have an effect. Without a temperature it is 1.
        experts: Experts that the sampler's router chose for each token that it read,
            uint8 or int16 [m + n - 1, number of MoE layers, experts of a token]; None
            for a model without experts.

    Raises:
        DataError: Shapes disagree, a log-probability is not finite, or tokens were
            drawn from a filtered distribution.

    Example:
        >>> rollout = Rollout(
        ...     prompt=0, sample=0, given="2 + 2 =", prompt_ids=[5, 6], ids=[7, 1],
        ...     logprobs=[-0.5, -0.25], finish_reason="stop", text="4",
        ...     row={"answer": 4}, rewards={"exact": 1.0, "short": None},
        ... )
        >>> rollout.ids.dtype, rollout.total({"exact": 2.0})
        (dtype('int32'), 2.0)
        >>> rollout.total({"exact": 2.0, "short": 1.0})
    """

    prompt: int
    sample: int
    given: str | Sequence[Mapping[str, Any]]
    prompt_ids: np.ndarray | Sequence[int]
    ids: np.ndarray | Sequence[int]
    logprobs: np.ndarray | Sequence[float]
    finish_reason: str
    text: str
    step: int = 0
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, dtype in _ARRAYS.items():
            array, problem = _array_of(name, getattr(self, name), dtype)
            object.__setattr__(self, name, array)
            problems += [problem] if problem else []
        if problems := problems or [*_problems(self)]:
            raise DataError(*problems)

    @property
    def temperature(self) -> float:
        """Divisor of the logits that the tokens were drawn from."""
        return float(self.sampling.get("temperature", 1.0))

    def total(self, weights: Mapping[str, float]) -> float | None:
        """Sums the rewards by weight.

        Args:
            weights: Weight of each reward function that counts.

        Returns:
            The sum; None if a function gave no reward, as a part of the sum does not
            compare with the sums of other texts.
        """
        total = 0.0
        for name, weight in weights.items():
            if (reward := self.rewards.get(name)) is None:
                return None
            total += weight * reward
        return total


_ARRAYS = {"prompt_ids": np.int32, "ids": np.int32, "logprobs": np.float32}


def sampling_problems(sampling: Mapping[str, Any]) -> list[Problem]:
    """Finds settings whose log-probabilities training cannot compute again.

    Training computes the softmax of logits over temperature. A filter or a penalty
    gives another distribution, and a temperature of 0 gives none.

    Args:
        sampling: Settings of `zjax.Sampling` by name; what is missing has no effect.

    Returns:
        One problem for each setting at fault.

    Example:
        >>> print(*sampling_problems({"temperature": 1.0, "top_k": 40}))
        top_k=40 draws from a filtered distribution, which training does not; use 0
    """
    problem = "draws from a filtered distribution, which training does not"
    problems = [
        Problem(name, sampling[name], problem, f"use {plain!r}")
        for name, plain in _PLAIN.items()
        if sampling.get(name, plain) not in (plain, [])  # JSON has no tuples
    ]
    if sampling.get("temperature", 1.0) == 0:
        problem = "draws nothing, so that tokens have no probability to learn from"
        problems.append(Problem("temperature", 0.0, problem, "use 1.0"))
    return problems


def row_problem(row: Mapping[str, Any]) -> str:
    """Tells why fields of a record cannot be the row of a rollout; empty if they can.

    Example:
        >>> row_problem({"answer": 4}), row_problem({"completion": "4"})
        ('', "has the field 'completion', an argument of rewards")
    """
    for name in _GIVEN:
        if name in row:
            return f"has the field {name!r}, an argument of rewards"
    try:
        json.dumps(dict(row), allow_nan=False)
    except (TypeError, RecursionError) as error:
        return f"has a value that is no JSON ({error})"
    except ValueError:
        return "has a number that is not finite"
    return ""


def encode_line(rollout: Rollout, previous: int = 0) -> tuple[bytes, int]:
    """Encodes a rollout as a line of JSON.

    Args:
        rollout: Rollout to encode.
        previous: Checksum of the line before; 0 for the first.

    Returns:
        The line with the newline, and the checksum of all lines so far.

    Raises:
        DataError: A field of `row`, `given`, `rewards` or `sampling` is no JSON.
    """
    record = {x.name: getattr(rollout, x.name) for x in dataclasses.fields(rollout)}
    record |= {name: record[name].tolist() for name in _ARRAYS}
    record["experts"] = _encode_experts(rollout.experts)
    try:
        # Escapes outside of ASCII: half a character (a lone surrogate) is no UTF-8.
        body = json.dumps(record, allow_nan=False)[:-1].encode()
    except (TypeError, ValueError, RecursionError) as error:
        field, problem = f"rollout {rollout.prompt}", f"is no JSON ({error})"
        remedy = "give texts, finite numbers, lists and dicts with texts for keys"
        raise DataError(Problem(field, rollout.sample, problem, remedy)) from error
    checksum = zlib.crc32(body, previous)
    return body + _tail(checksum), checksum


def line_checksum(line: bytes) -> int:
    """Reads the checksum at the end of a line of `encode_line`; 0 for an empty line."""
    return int(line[-_TAIL_BYTES:].split(b'"')[3], 16) if line else 0


def write_rollouts(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> str:
    """Writes a file of rollouts, completely or not at all.

    Args:
        path: File to write, or to replace once all rollouts are on disk.
        rollouts: Rollouts in the order of the file.

    Returns:
        Checksum of the file, 8 hexadecimal digits, which `read_rollouts` verifies.

    Raises:
        DataError: A rollout holds values that are no JSON.
        OutputError: The file cannot be written.
    """
    path, checksum = pathlib.Path(path), 0
    with writing(path), new_file(path) as partial, partial.open("wb") as file:
        for rollout in rollouts:
            line, checksum = encode_line(rollout, checksum)
            file.write(line)
    return f"{checksum:08x}"


def read_rollouts(
    path: str | os.PathLike[str], checksum: str | None = None
) -> list[Rollout]:
    """Reads a file of `write_rollouts`, or of `zjax generate --rollouts`.

    Args:
        path: File of rollouts.
        checksum: Checksum that `write_rollouts` returned; None verifies each line and
            the order, but not that no line is missing at the end.

    Returns:
        The rollouts in the order of the file.

    Raises:
        DataError: The file is missing, a line is cut off or not of the checksum, a
            rollout occurs twice, or a field is missing or of another type.
    """
    path = pathlib.Path(path)
    if fault := find_fault(path):
        raise DataError(Problem("rollouts", str(path), fault, "check the path"))
    found, last, seen = [], 0, set[tuple[int, int]]()
    with path.open("rb") as file:
        for number, (body, line_sum) in enumerate(_verified_lines(path, file), 1):
            last, rollout = line_sum, _decode(path, number, body)
            place = rollout.prompt, rollout.sample
            if place in seen:
                problem = f"has sample {place[1]} of prompt {place[0]} a second time"
                _refuse(path, number, problem)
            seen.add(place)
            found.append(rollout)
    if checksum not in (None, f"{last:08x}"):
        problem = f"has checksum {last:08x}, not {checksum}: lines are missing"
        raise DataError(Problem("rollouts", str(path), problem, _AGAIN))
    return found


_AGAIN = "write the file again"


def _refuse(path: pathlib.Path, number: int, problem: str) -> NoReturn:
    """Raises a DataError that names the file and the line."""
    where = f"{problem} in line {number}"
    raise DataError(Problem("rollouts", str(path), where, _AGAIN))


def _verified_lines(path: pathlib.Path, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yields the JSON of each line without the checksum, and the verified checksum."""
    checksum = 0
    # One byte more than allowed tells a long line, in bounded memory.
    lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            _refuse(path, number, f"has more than {MAX_LINE_BYTES:,} bytes")
        if not line.endswith(b"\n"):
            _refuse(path, number, "is cut off")
        body, tail = line[:-_TAIL_BYTES], line[-_TAIL_BYTES:]
        checksum = zlib.crc32(body, checksum)
        if tail != _tail(checksum):
            _refuse(path, number, "does not match the checksum of all lines so far")
        yield body, checksum


def _tail(checksum: int) -> bytes:
    """Ends a line with a checksum."""
    return b', "crc32": "%08x"}\n' % checksum


_TAIL_BYTES = len(_tail(0))


def _decode(path: pathlib.Path, number: int, body: bytes) -> Rollout:
    """Makes the rollout of a line, or refuses fields that a rollout has not."""
    record = parse_json(body + b"}")
    names = {x.name for x in dataclasses.fields(Rollout)}
    if wrong := names ^ {*record}:
        _refuse(path, number, f"has other fields than a rollout ({sorted(wrong)})")
    try:
        record["experts"] = _decode_experts(record["experts"])
        return Rollout(**record)
    except (KeyError, TypeError, ValueError) as error:  # a DataError, too
        _refuse(path, number, f"is no rollout ({error})")


def _encode_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Encodes experts as JSON: their number is large, and their bytes are few."""
    if experts is None:
        return None
    content = base64.b64encode(np.ascontiguousarray(experts).tobytes()).decode()
    return {"dtype": experts.dtype.name, "shape": experts.shape, "base64": content}


def _decode_experts(record: Mapping[str, Any] | None) -> np.ndarray | None:
    """Decodes what `_encode_experts` returned."""
    if record is None:
        return None
    content = base64.b64decode(record["base64"], validate=True)
    return np.frombuffer(content, np.dtype(record["dtype"])).reshape(record["shape"])


def _array_of(name: str, value: Any, dtype: type) -> tuple[Any, Problem | None]:
    """Converts a value to a vector of a dtype, or tells why it has none."""
    array = np.asarray(value)
    kinds = "iu" if dtype is np.int32 else "iuf"
    if array.ndim != 1 or not array.size or array.dtype.kind not in kinds:
        problem = f"is {array.dtype}{[*array.shape]}, and not {dtype.__name__}[n]"
        return value, Problem(name, value, problem, "give one number for each token")
    converted, remedy = array.astype(dtype), "give finite numbers"
    fits = np.isfinite(converted)
    if dtype is np.int32:  # ids beyond int32 would become other ids
        fits, remedy = (array >= 0) & (array < 2**31), "give ids of 0 to 2^31 - 1"
    if not fits.all():
        problem = f"holds {array[~fits][0]} at place {int(np.argmin(fits))}"
        return value, Problem(name, value, problem, remedy)
    return converted, None


def _problems(rollout: Rollout) -> Iterator[Problem]:
    """Yields the problems of a rollout whose arrays are vectors."""
    for name in ("prompt", "sample", "step"):
        value = getattr(rollout, name)
        if not isinstance(value, int) or value < 0:
            yield Problem(name, value, "is no number of 0 or more", "use 0 or more")
    if rollout.finish_reason not in FINISH_REASONS:
        remedy = f"use one of {', '.join(FINISH_REASONS)}"
        yield Problem("finish_reason", rollout.finish_reason, "is unknown", remedy)
    if len(rollout.ids) != len(rollout.logprobs):
        problem = f"has {len(rollout.logprobs)} numbers for {len(rollout.ids)} tokens"
        yield Problem("logprobs", "...", problem, "give one for each token of `ids`")
    for name, value in rollout.rewards.items():
        if value is not None and not math.isfinite(value):
            yield Problem(f"rewards.{name}", value, "is not finite", "use None")
    if problem := row_problem(rollout.row):
        remedy = "name the field otherwise, or make it JSON"
        yield Problem("row", "...", problem, remedy)
    yield from sampling_problems(rollout.sampling)
    yield from _expert_problems(rollout)


def _expert_problems(rollout: Rollout) -> Iterator[Problem]:
    """Yields the problems of the experts of a rollout."""
    if rollout.experts is None:
        return
    shape, dtype = rollout.experts.shape, rollout.experts.dtype.name
    num_read = len(rollout.prompt_ids) + len(rollout.ids) - 1
    if len(shape) != 3 or shape[0] != num_read:
        problem = f"has the shape {shape}, and {num_read} tokens were read"
        remedy = "give [tokens, MoE layers, experts of a token]"
        yield Problem("experts", "...", problem, remedy)
    if dtype not in EXPERT_DTYPES:
        problem, remedy = f"is of {dtype}", f"use {' or '.join(EXPERT_DTYPES)}"
        yield Problem("experts", "...", problem, remedy)
