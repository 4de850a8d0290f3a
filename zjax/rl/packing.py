"""Packs rollouts into rows by a budget of tokens, with what the loss reads of each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from zjax.data.packing import pack_first_fit
from zjax.errors import ConfigError, DataError, Problem
from zjax.typing import IGNORED

Aggregation = Literal["token_mean", "sequence_mean", "constant_mean"]


@runtime_checkable
class Sampled(Protocol):
    """What packing reads of a rollout."""

    @property
    def prompt_ids(self) -> Sequence[int] | np.ndarray:
        """Tokens of the prompt, at least one."""
        ...

    @property
    def ids(self) -> Sequence[int] | np.ndarray:
        """Tokens of the completion, int32[n]."""
        ...

    @property
    def logprobs(self) -> Sequence[float] | np.ndarray:
        """Log-probabilities of the completion as it was drawn, float32[n]."""
        ...

    @property
    def experts(self) -> np.ndarray | None:
        """Experts of each token but the last, by the sampler's routers.

        Integers [m + n - 1, mixtures, experts of a token]; None without a record.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of packed rollouts, and the place of each rollout.

    Args:
        batch: Arrays [B, L] of one optimizer step, on the host: `tokens`, `targets`
            (-100 outside of completions), `segment_ids` and `positions` in int32,
            `weights` in float32; `experts` int16[B, L, mixtures, experts of a token] of
            a mixture of experts, -1 without a record; and under `rl`, float32,
            `advantages`, `logprobs` of the sampler, `units`, and what `with_arrays`
            adds.
        places: Row and first column of each completion's values, and their number;
            None for a rollout that is left out. The value of a token stands where the
            token is predicted, one column before it.
    """

    batch: Mapping[str, Any]
    places: tuple[tuple[int, slice] | None, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompts and completions in the batch."""
        return int((self.batch["segment_ids"] > 0).sum())

    def unpack(self, values: np.ndarray) -> list[np.ndarray]:
        """Selects the values of each completion.

        Args:
            values: Array [B, L, ...] of the packed tokens, such as `logprobs_of` gives.

        Returns:
            Array [n, ...] for each rollout, in the order of the rollouts; [0, ...] for
            a rollout that is left out.
        """
        values = np.asarray(values)
        nowhere = (0, slice(0, 0))
        return [values[place or nowhere] for place in self.places]

    def with_arrays(self, **arrays: Sequence[Any] | np.ndarray) -> "Packed":
        """Adds arrays to what the loss reads under `rl`.

        Args:
            **arrays: By name, such as `old_logprobs` or `reference_logprobs`: an array
                [B, L, ...] of the packed tokens, or values [n, ...] of each rollout.

        Returns:
            The batch with further arrays; 0 outside of completions for values of
            rollouts.

        Raises:
            DataError: Values of another number of rollouts or tokens.
        """
        added = {
            name: x if isinstance(x, np.ndarray) else self._spread(name, x)
            for name, x in arrays.items()
        }
        rl = {**self.batch["rl"], **added}
        return dataclasses.replace(self, batch={**self.batch, "rl": rl})

    def _spread(self, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
        """Writes values of each rollout to the places of the tokens."""
        if len(values) != len(self.places):
            problem = f"is not the {len(self.places)} of the rollouts"
            problems = [Problem(f"len({name})", len(values), problem, "give one each")]
            raise DataError(*problems)
        arrays = [np.asarray(x, np.float32) for x in values]
        pairs = [*zip(arrays, self.places, strict=True)]
        problems = [
            Problem(
                f"{name}[{i}]",
                x.shape,
                f"is not of {_size(place)} tokens",
                "give a value for each",
            )
            for i, (x, place) in enumerate(pairs)
            if place and len(x) != _size(place)
        ]
        if problems:
            raise DataError(*problems)
        rest = next((x.shape[1:] for x, place in pairs if place), ())
        spread = np.zeros((*self.batch["tokens"].shape, *rest), np.float32)
        for x, place in pairs:
            if place:
                spread[place] = x
        return spread


def pack(
    rollouts: Sequence[Sampled],
    advantages: Sequence[Any] | np.ndarray,
    *,
    length: int,
    num_rows: int | Sequence[int],
    aggregation: Aggregation = "token_mean",
    constant: int = 0,
    shares_rows: bool = True,
) -> Packed:
    """Packs the rollouts of one optimizer step into rows of `length` tokens.

    First-fit from the longest to the shortest; the result depends on the order of the
    rollouts alone. No sequence is split, and attention stays within a sequence. Rows
    without a sequence are padding, and add nothing to the loss.

    Args:
        rollouts: Rollouts, or other objects with `prompt_ids`, `ids`, `logprobs` and
            `experts`.
        advantages: Advantage of each rollout, or of each token of each rollout,
            float32[n]. A rollout with an advantage of NaN, or without a token, is left
            out.
        length: Tokens of a row, at least those of the longest rollout.
        num_rows: Rows of the batch, or several numbers, of which the smallest that
            suffices is used: each number is one more program to compile.
        aggregation: Aggregation of the losses of tokens, by the functions of this name.
        constant: Length of `constant_mean`, at least 1: the limit of generated tokens.
        shares_rows: Whether a row holds several rollouts; False for a model that reads
            no `segment_ids`.

    Returns:
        The batch and the place of each rollout.

    Raises:
        ConfigError: `constant` does not fit the aggregation, or `num_rows` is no
            positive number.
        DataError: A rollout without prompt or of unequal arrays, or longer than a row;
            more rollouts than fit; advantages of another number; or experts of
            different models.

    Example:
        >>> from types import SimpleNamespace
        >>> drawn = SimpleNamespace(
        ...     prompt_ids=[5, 6],
        ...     ids=np.array([7, 1]),
        ...     logprobs=np.array([-0.5, -0.1]),
        ...     experts=None,
        ... )
        >>> packed = pack([drawn, drawn], [1.0, -1.0], length=8, num_rows=1)
        >>> packed.batch["tokens"].tolist(), packed.batch["targets"].tolist()
        ([[5, 6, 7, 1, 5, 6, 7, 1]], [[-100, 7, 1, -100, -100, 7, 1, -100]])
        >>> [x.tolist() for x in packed.unpack(packed.batch["rl"]["advantages"])]
        [[1.0, 1.0], [-1.0, -1.0]]
    """
    row_counts = _checked_counts(num_rows, aggregation, constant)
    values = _checked_advantages(rollouts, advantages)
    used = [i for i, x in enumerate(values) if len(x) and not np.isnan(x).any()]
    sizes = np.array([_length(rollouts[i]) for i in used], np.int64)
    _check_rollouts(rollouts, sizes, used, length)
    rows = pack_first_fit(sizes if shares_rows else np.full_like(sizes, length), length)
    needed = int(rows.max()) + 1 if len(rows) else 0
    fitting = [count for count in row_counts if count >= needed]
    if not fitting:
        problem = f"is less than the {needed} rows that {sizes.sum()} tokens need"
        remedy = "raise it, or give fewer rollouts"
        raise DataError(Problem("num_rows", row_counts[-1], problem, remedy))
    table = _Table((fitting[0], length), _sizes_of_experts(rollouts, used))
    places: list[tuple[int, slice] | None] = [None] * len(rollouts)
    for i, row in zip(used, rows.tolist(), strict=True):
        weight, unit = _weights(len(rollouts[i].ids), aggregation, constant)
        places[i] = table.add(row, rollouts[i], values[i], weight, unit)
    return Packed(table.batch(), tuple(places))


class _Table:
    """Rows that fill from the left."""

    def __init__(self, shape: tuple[int, int], experts: tuple[int, ...]):
        names = ("tokens", "segment_ids", "positions")
        self.ints = {name: np.zeros(shape, np.int32) for name in names}
        self.ints["targets"] = np.full(shape, IGNORED, np.int32)
        names = ("weights", "units", "advantages", "logprobs")
        self.floats = {name: np.zeros(shape, np.float32) for name in names}
        self.experts = np.full((*shape, *experts), -1, np.int16) if experts else None
        self._ends = np.zeros(shape[0], np.int64)
        self._counts = np.zeros(shape[0], np.int32)

    def add(
        self,
        row: int,
        rollout: Sampled,
        advantages: np.ndarray,
        weight: float,
        unit: float,
    ) -> tuple[int, slice]:
        """Writes a rollout behind the last one of a row; returns the values' place."""
        tokens = np.concatenate([np.asarray(rollout.prompt_ids), rollout.ids])
        start, num_prompt = int(self._ends[row]), len(rollout.prompt_ids)
        span = slice(start, start + len(tokens))
        self._ends[row], self._counts[row] = span.stop, self._counts[row] + 1
        self.ints["tokens"][row, span] = tokens
        self.ints["segment_ids"][row, span] = self._counts[row]
        self.ints["positions"][row, span] = np.arange(len(tokens))
        if self.experts is not None and rollout.experts is not None:
            read = slice(start, span.stop - 1)  # nothing is drawn from the last token
            self.experts[row, read] = rollout.experts
        predicted = slice(start + num_prompt - 1, span.stop - 1)
        self.ints["targets"][row, predicted] = rollout.ids
        self.floats["weights"][row, predicted] = weight
        self.floats["units"][row, predicted] = unit
        self.floats["advantages"][row, predicted] = advantages
        self.floats["logprobs"][row, predicted] = rollout.logprobs
        return row, predicted

    def batch(self) -> dict[str, Any]:
        """Returns the arrays as the policy reads them."""
        floats = dict(self.floats)
        batch = {**self.ints, "weights": floats.pop("weights"), "rl": floats}
        return batch if self.experts is None else batch | {"experts": self.experts}


def _sizes_of_experts(
    rollouts: Sequence[Sampled], used: Sequence[int]
) -> tuple[int, ...]:
    """Returns the numbers of mixtures and of experts of a token; nothing without."""
    found = {i: x for i in used if (x := rollouts[i].experts) is not None}
    sizes = next((x.shape[1:] for x in found.values()), ())
    problem = f"is not a record of {sizes} experts for each token but the last"
    problems = [
        Problem(f"rollouts[{i}].experts", x.shape, problem, "draw all by one model")
        for i, x in found.items()
        if x.shape != (_length(rollouts[i]) - 1, *sizes) or len(sizes) != 2
    ]
    if problems:
        raise DataError(*problems)
    return sizes


def _weights(
    num_tokens: int, aggregation: Aggregation, constant: int
) -> tuple[float, float]:
    """Returns what a token of a completion adds to the loss, and to the weight."""
    if aggregation == "token_mean":
        return 1.0, 1.0
    if aggregation == "sequence_mean":
        return 1 / num_tokens, 1 / num_tokens
    return 1 / constant, 1 / num_tokens


def _length(rollout: Sampled) -> int:
    """Number of tokens of prompt and completion."""
    return len(rollout.prompt_ids) + len(rollout.ids)


def _size(place: tuple[int, slice]) -> int:
    """Number of values at a place."""
    return place[1].stop - place[1].start


def _checked_counts(
    num_rows: int | Sequence[int], aggregation: Aggregation, constant: int
) -> list[int]:
    """Returns the numbers of rows, ascending; refuses settings that cannot work."""
    counts = sorted([num_rows] if isinstance(num_rows, int) else num_rows)
    problems = []
    if not counts or counts[0] < 1:
        remedy = "give the rows of a step"
        problems += [Problem("num_rows", num_rows, "is below 1", remedy)]
    if aggregation == "constant_mean" and constant < 1:
        remedy = "use the limit of generated tokens"
        problems += [Problem("constant", constant, "is below 1", remedy)]
    elif aggregation != "constant_mean" and constant:
        problem = f"is not read by aggregation={aggregation!r}"
        problems += [Problem("constant", constant, problem, "leave it out")]
    if problems:
        raise ConfigError(*problems)
    return counts


def _checked_advantages(
    rollouts: Sequence[Sampled], advantages: Sequence[Any] | np.ndarray
) -> list[np.ndarray]:
    """Returns the advantages of the tokens of each rollout."""
    if len(advantages) != len(rollouts):
        problem, remedy = f"is not the {len(rollouts)} of the rollouts", "give one each"
        field = "len(advantages)"
        raise DataError(Problem(field, len(advantages), problem, remedy))
    values = [np.asarray(x, np.float32) for x in advantages]
    problems = [
        Problem(
            f"advantages[{i}]",
            x.shape,
            f"is not of the {len(rollout.ids)} tokens of the completion",
            "give a number, or one for each token",
        )
        for i, (x, rollout) in enumerate(zip(values, rollouts, strict=True))
        if x.shape not in ((), (len(rollout.ids),))
    ]
    if problems:
        raise DataError(*problems)
    return [
        np.broadcast_to(x, len(rollout.ids))
        for x, rollout in zip(values, rollouts, strict=True)
    ]


def _check_rollouts(
    rollouts: Sequence[Sampled], sizes: np.ndarray, used: Sequence[int], length: int
) -> None:
    """Refuses rollouts without a prompt, of unequal arrays, or longer than a row."""
    problems = []
    for i, size in zip(used, sizes.tolist(), strict=True):
        rollout, name = rollouts[i], f"rollouts[{i}]"
        if len(rollout.prompt_ids) == 0:
            problem, remedy = "is empty", "begin the prompt with a token"
            problems += [Problem(f"{name}.prompt_ids", [], problem, remedy)]
        if len(rollout.logprobs) != len(rollout.ids):
            problem = f"is not the {len(rollout.ids)} of the tokens"
            remedy = "give the log-probability of each token as it was drawn"
            field = f"len({name}.logprobs)"
            problems += [Problem(field, len(rollout.logprobs), problem, remedy)]
        if size > length:
            problem = f"tokens are more than the length={length} of a row"
            remedy = "raise the length"
            problems += [Problem(f"{name}", size, problem, remedy)]
    if problems:
        raise DataError(*problems)
