"""Evaluation data: each row once, in one order for runs of every seed.

All batches have `global_batch_size` rows, so that one compiled program serves on every
mesh. The remaining rows at the end are split into groups with sizes that divide the
batch size, and a group is repeated to fill a batch: the mean over that batch is the
mean over the group, for weighted and plain means alike. Weighted by the rows of the
groups, the batches give the mean over all rows.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jaxtyping import Int64

from zjax.data import batches as wrapping
from zjax.data import draws, loader, masking, packing, placement, source
from zjax.data.draws import WholeRows
from zjax.data.entries import check_batch
from zjax.data.sums import BatchChain
from zjax.errors import ConfigError, DataError, Problem
from zjax.settings import schema
from zjax.sharding.activations import map_rows, rows_of
from zjax.typing import Entries

ALL = -1
"""Value of `evaluation.num_batches` that takes all rows."""
SEED = 0
"""Seed of the order of evaluation rows, in every run."""


class FilledBatch(NamedTuple):
    """A batch filled by repetition of some rows."""

    num_rows: int
    """Number of distinct rows; divides the batch size."""
    batch: Any
    """Global arrays whose first dim is the batch size."""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """The evaluation data of a run, read from the start at each evaluation."""

    open_batches: Callable[[], contextlib.AbstractContextManager[Iterator[FilledBatch]]]
    description: str

    def mean(self, evaluate: Callable[[Any], Mapping[str, Any]]) -> dict[str, float]:
        """Averages the metrics of batches over the rows of the set, each row once.

        `evaluate(batch)` returns scalars on the device, means over `weight` units. The
        result has `eval_<name>` of each mean, NaN without weight, and `evaluated_rows`.
        """
        with self.open_batches() as batches:
            results = [(filled.num_rows, evaluate(filled.batch)) for filled in batches]
        if not results:
            problem = "gave no batch"
            remedy = "give an iterable that starts anew, such as a list"
            raise DataError(Problem("evaluation_batches", "given", problem, remedy))
        # One transfer at the end, so that batches are computed without waiting.
        means = mean_over_rows(jax.device_get(results))
        num_rows = float(sum(num_rows for num_rows, _ in results))
        named = {f"eval_{name}": value for name, value in means.items()}
        return named | {"evaluated_rows": num_rows}


@dataclasses.dataclass(frozen=True)
class EvaluationOrder:
    """Rows of each batch of an evaluation."""

    num_rows: int
    num_all: int
    global_batch_size: int

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of distinct rows of each batch."""
        num_full, remainder = divmod(self.num_rows, self.global_batch_size)
        full = (self.global_batch_size,) * num_full
        return full + group_sizes(remainder, self.global_batch_size)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each batch's first row in the order."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of one batch, repeated to fill the batch."""
        first, size = self.starts[step], self.sizes[step]
        positions = np.arange(first, first + size, dtype=np.int64)
        # Of all rows, so that a smaller set is the start of a larger set.
        rows = draws.permute_rows(positions, self.num_all, SEED, epoch=0)
        return np.tile(rows, self.global_batch_size // size)


def group_sizes(num_rows: int, batch_size: int) -> tuple[int, ...]:
    """Splits rows into groups that fill a batch by repetition, largest first.

    The sizes divide `batch_size`, and add up to `num_rows`, at most `batch_size`.

    Example:
        >>> group_sizes(7, 8), group_sizes(7, 12), group_sizes(8, 8)
        ((4, 2, 1), (6, 1), (8,))
    """
    sizes = []
    for size in range(num_rows, 0, -1):
        if batch_size % size == 0:
            sizes += [size] * (num_rows // size)
            num_rows %= size
    return tuple(sizes)


def find_evaluation(
    config: schema.Config,
    shardings: placement.Shardings,
    batches: Any = None,
    evaluation_batches: Any = None,
) -> EvaluationSet | None:
    """Finds the evaluation data of a run, or None.

    Training `batches` of the user are not evaluated on: with such batches, only
    `evaluation_batches` count.
    """
    data, batch_size = config.data, config.global_batch_size
    number = config.evaluation.num_batches
    if not number:
        return None
    if evaluation_batches is not None:
        return _wrap(evaluation_batches, data, shardings, number, batch_size)
    if batches is not None:
        return None
    if number == ALL and data.source == "synthetic":
        problem = f"asks for all of {source.NUM_ROWS:,} synthetic rows"
        remedy = "use a number of batches, such as 8"
        raise ConfigError(Problem("evaluation.num_batches", ALL, problem, remedy))
    rows = source.open_rows(config, "validation")
    if config.model.kind == "encoder":
        rule = masking.make_rule(data, config.model.vocab_size, SEED)
        # Step 0: equal masks in every evaluation.
        rows = masking.MaskedRows(rows, rule, step=0)
    return evaluate_rows(rows, data, shardings, number, batch_size)


def _wrap(
    batches: Any,
    data: schema.Data,
    shardings: placement.Shardings,
    num_batches: int,
    batch_size: int,
) -> EvaluationSet:
    """Evaluates on a dataset with columns, or an iterable of batches that can restart.

    Batches are trees of numeric arrays with at most `batch_size` rows in the first dim
    (scalars are allowed).
    """
    batches = wrapping.with_columns(batches, "evaluation_batches")
    if isinstance(batches, wrapping.ColumnDataset):
        rows = wrapping.ColumnRows(batches)
        return evaluate_rows(rows, data, shardings, num_batches, batch_size)
    if isinstance(batches, Iterator):
        name = type(batches).__name__
        problem = "is an iterator, which gives other batches at each evaluation"
        remedy = "give an iterable that starts anew, such as a list"
        raise DataError(Problem("evaluation_batches", name, problem, remedy))
    end = None if num_batches == ALL else num_batches
    entries = placement.entries_in(shardings)

    def place(filled: FilledBatch) -> FilledBatch:
        name = "evaluation_batches"
        placed = placement.place_batch(filled.batch, shardings, batch_size, name)
        return filled._replace(batch=placed)

    sums: list[str] = []

    def draw() -> Iterator[FilledBatch]:
        chain, total = BatchChain(), ""
        for number, batch in enumerate(itertools.islice(batches, end)):
            total = chain.add(batch)
            yield from fill_batches(
                batch, batch_size, f"evaluation_batches[{number}]", entries
            )
        sums.append(total)
        # Every evaluation is compared with the first.
        if len(sums) == 2 and sums[0] != sums.pop():
            logging.warning(
                "evaluation_batches are other ones than at the first evaluation: "
                "their means cannot be compared"
            )

    @contextlib.contextmanager
    def open_batches() -> Iterator[Iterator[FilledBatch]]:
        read = wrapping.prefetch(draw(), place, data.prefetch_batches)
        # Ends the prefetching thread, even if the evaluation fails.
        with contextlib.closing(read):
            yield read

    which = "all batches" if end is None else f"up to {end} batches"
    return EvaluationSet(open_batches, f"{which} of evaluation_batches")


def evaluate_rows(
    rows: packing.Rows,
    data: schema.Data,
    shardings: placement.Shardings,
    num_batches: int,
    batch_size: int,
) -> EvaluationSet:
    """Evaluation set of rows that can be read by number."""
    num_all = len(rows)
    loader.check_batch_size(batch_size)
    num_wanted = num_all if num_batches == ALL else num_batches * batch_size
    order = EvaluationOrder(min(num_wanted, num_all), num_all, batch_size)
    batches = loader.load_draws(
        WholeRows(rows, order, (batch_size,)),
        # Starting worker processes would take longer than reading few batches.
        dataclasses.replace(data, num_workers=0),
        shardings,
        num_batches=len(order.sizes),
    )

    @contextlib.contextmanager
    def open_batches() -> Iterator[Iterator[FilledBatch]]:
        batches.rewind()
        with batches:
            yield map(FilledBatch, order.sizes, batches)

    return EvaluationSet(open_batches, f"{order.num_rows:,} of {num_all:,} rows")


def fill_batches(
    batch: Any, batch_size: int, name: str, entries: Entries
) -> Iterator[FilledBatch]:
    """Yields a full batch as it is; else full batches made of groups of rows."""
    batch = check_batch(batch, entries, name=name)
    num_rows = next((x.shape[0] for _, x in rows_of(batch, entries)), batch_size)
    if not 1 <= num_rows <= batch_size:
        problem = f"rows are not 1 to global_batch_size={batch_size}"
        remedy = "cut the evaluation data into such batches"
        raise DataError(Problem(name, num_rows, problem, remedy))
    if num_rows == batch_size:
        yield FilledBatch(num_rows, batch)
        return
    first = 0
    for size in group_sizes(num_rows, batch_size):
        rows = slice(first, first + size)
        first += size
        filled = functools.partial(_fill, rows=rows, times=batch_size // size)
        yield FilledBatch(size, map_rows(filled, lambda leaf: leaf, batch, entries))


def _fill(array: Any, rows: slice, times: int) -> Any:
    # jax.numpy.tile would put a host array on one device.
    tile = jax.numpy.tile if isinstance(array, jax.Array) else np.tile
    return tile(array[rows], (times, *[1] * (array.ndim - 1)))


def mean_over_rows(results: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Averages metrics of batches by distinct rows; each row counts once.

    Metrics are means over `weight` units, and NaN if no row has weight.
    """
    totals: dict[str, float] = {}
    total = 0.0
    for num_rows, metrics in results:
        weight = num_rows * float(metrics["weight"])
        total += weight
        for name in metrics.keys() - {"weight"}:
            # A batch without weight has a mean of NaN, which 0 * NaN would spread.
            value = weight * float(metrics[name]) if weight else 0.0
            totals[name] = totals.get(name, 0.0) + value
    return {
        name: value / total if total else math.nan for name, value in totals.items()
    }
