"""What a run is evaluated on: each row once, in one order, whatever the run's seed.

All batches have `global_batch_size` rows, so that one compiled program serves on every
mesh. The rows that are left at the end are cut into parts whose sizes divide the batch,
and a part fills a batch by repetition: the mean over that batch is the mean over the
part, for losses with weights and for plain means alike. Weighted by the rows of their
parts, the batches give the mean over all rows.
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

from zjax.config import schema
from zjax.data import batches as wrapping
from zjax.data import loader, packing, placement, sampler, source, synthetic
from zjax.data.digest import BatchChain
from zjax.data.entries import check_batch
from zjax.errors import ConfigError, DataError, Problem
from zjax.sharding.batch import map_rows, rows_of
from zjax.typing import Entries

ALL = -1
"""`evaluation.num_batches` of a pass over all rows."""
SEED = 0
"""The order of evaluation rows, in every run."""


class Part(NamedTuple):
    """Rows that fill one batch."""

    num_rows: int
    """Rows of the batch without their repetitions; divides the batch size."""
    batch: Any
    """Global arrays whose first dim is the batch size."""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """The evaluation data of a run, read anew at each evaluation.

    Args:
        open_parts: Starts a pass; gives its parts in a `with` statement.
        description: Which rows a pass takes.
    """

    open_parts: Callable[[], contextlib.AbstractContextManager[Iterator[Part]]]
    description: str

    def mean(self, evaluate: Callable[[Any], Mapping[str, Any]]) -> dict[str, float]:
        """Averages what batches give over the rows of the set, each row once.

        Args:
            evaluate: `evaluate(batch)`, scalars on the device: means over `weight`
                units.

        Returns:
            `eval_<name>` of each mean, NaN where no row has weight; and
            `evaluated_rows`.

        Raises:
            DataError: There is no batch, or one is malformed.
        """
        with self.open_parts() as parts:
            given = [(part.num_rows, evaluate(part.batch)) for part in parts]
        if not given:
            problem = "gave no batch"
            remedy = "give an iterable that starts anew, such as a list"
            raise DataError(Problem("evaluation_batches", "given", problem, remedy))
        means = mean_over_rows(jax.device_get(given))
        num_rows = float(sum(num_rows for num_rows, _ in given))
        named = {f"eval_{name}": value for name, value in means.items()}
        return named | {"evaluated_rows": num_rows}


@dataclasses.dataclass(frozen=True)
class Pass:
    """Which rows each batch of an evaluation takes.

    Args:
        num_rows: Rows of the pass, 1 or more; a part of the data if fewer than
            `num_all`.
        num_all: Rows of the data.
        global_batch_size: Rows of a batch, 1 or more.

    Example:
        >>> whole = Pass(num_rows=13, num_all=13, global_batch_size=8)
        >>> whole.sizes
        (8, 4, 1)
        >>> sorted({row for step in range(3) for row in whole.indices(step).tolist()})
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    """

    num_rows: int
    num_all: int
    global_batch_size: int

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each batch without their repetitions."""
        num_whole, rest = divmod(self.num_rows, self.global_batch_size)
        whole = (self.global_batch_size,) * num_whole
        return whole + part_sizes(rest, self.global_batch_size)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Place of the first row of each batch in the order of the pass."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Lists the rows of one batch, repeated where there are too few to fill it."""
        first, size = self.starts[step], self.sizes[step]
        positions = np.arange(first, first + size, dtype=np.int64)
        rows = sampler.permute_rows(positions, self.num_all, SEED, epoch=0)
        return np.tile(rows, self.global_batch_size // size)


def part_sizes(num_rows: int, batch_size: int) -> tuple[int, ...]:
    """Cuts rows into parts that fill a batch by repetition, as few as can be found.

    Args:
        num_rows: 0 to `batch_size`.
        batch_size: 1 or more.

    Returns:
        Sizes that divide `batch_size`, the largest first; their sum is `num_rows`.

    Example:
        >>> part_sizes(7, 8), part_sizes(7, 12), part_sizes(8, 8)
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
    """Finds what a run is evaluated on.

    Args:
        config: As for `make_evaluation`.
        shardings: Where each array of a batch goes.
        batches: Training data of the caller; then only `evaluation_batches` count.
        evaluation_batches: As for `wrap_evaluation`.

    Returns:
        The data; None where there is none, or `evaluation.num_batches` is 0.

    Raises:
        DataError: The data cannot be evaluated on.
        ConfigError: All rows are asked for where there is no end of them.
    """
    if not config.evaluation.num_batches:
        return None
    if evaluation_batches is not None:
        return wrap_evaluation(evaluation_batches, config, shardings)
    return make_evaluation(config, shardings) if batches is None else None


def make_evaluation(
    config: schema.Config, shardings: placement.Shardings
) -> EvaluationSet:
    """Opens the held-out rows of the data that `config` names.

    Args:
        config: `data`, `evaluation.num_batches`, `global_batch_size` (1 or more) and
            `model.vocab_size`.
        shardings: Where each array of a batch goes.

    Raises:
        DataError: The data is missing, damaged, too short for one row, or has a larger
            vocabulary than the model.
        ConfigError: All rows are asked for where there is no end of them.
    """
    number = config.evaluation.num_batches
    if number == ALL and config.data.source == "synthetic":
        problem = f"asks for all of {synthetic.NUM_ROWS:,} synthetic rows"
        remedy = "use a number of batches, such as 8"
        raise ConfigError(Problem("evaluation.num_batches", ALL, problem, remedy))
    rows = source.open_rows(config, "validation")
    return _of_rows(rows, config, shardings)


def wrap_evaluation(
    batches: Any, config: schema.Config, shardings: placement.Shardings
) -> EvaluationSet:
    """Takes a dataset with columns, or an iterable of batches, for evaluation.

    Args:
        batches: The dataset, or an iterable that starts anew each time, of trees of
            numeric arrays whose first dim is `global_batch_size` or less, such as that
            of a last batch (scalars are free).
        config: `evaluation.num_batches`, `global_batch_size` and
            `data.prefetch_batches`.
        shardings: Where each array of a batch goes.

    Raises:
        DataError: An iterator, which gives other batches at the second evaluation; a
            dataset without rows, or with a column that is not numeric.
    """
    if isinstance(batches, wrapping.ColumnDataset):
        return _of_rows(wrapping.ColumnRows(batches), config, shardings)
    if isinstance(batches, Iterator):
        name = type(batches).__name__
        problem = "is an iterator, which gives other batches at each evaluation"
        remedy = "give an iterable that starts anew, such as a list"
        raise DataError(Problem("evaluation_batches", name, problem, remedy))
    number, batch_size = config.evaluation.num_batches, config.global_batch_size
    end = None if number == ALL else number
    entries = placement.entries_in(shardings)

    def place(part: Part) -> Part:
        place = "evaluation_batches"
        placed = placement.place_batch(part.batch, shardings, batch_size, place)
        return part._replace(batch=placed)

    sums: list[str] = []

    def draw() -> Iterator[Part]:
        chain, total = BatchChain(), ""
        for number, batch in enumerate(itertools.islice(batches, end)):
            total = chain.add(batch)
            yield from cut_batch(
                batch, batch_size, f"evaluation_batches[{number}]", entries
            )
        sums.append(total)
        if len(sums) == 2 and sums[0] != sums.pop():
            logging.warning(
                "evaluation_batches are other ones than at the first evaluation: "
                "their means cannot be compared"
            )

    @contextlib.contextmanager
    def open_parts() -> Iterator[Iterator[Part]]:
        read = wrapping.read_ahead(draw(), place, config.data)
        with contextlib.closing(read):
            yield read

    of = "all batches" if end is None else f"up to {end} batches"
    return EvaluationSet(open_parts, f"{of} of evaluation_batches")


def _of_rows(
    rows: packing.Rows, config: schema.Config, shardings: placement.Shardings
) -> EvaluationSet:
    number, num_all = config.evaluation.num_batches, len(rows)
    loader.check_batch_size(config)
    asked = num_all if number == ALL else number * config.global_batch_size
    order = Pass(min(asked, num_all), num_all, config.global_batch_size)
    # Few batches: processes that read would take longer to start.
    data = dataclasses.replace(config.data, num_workers=0)
    batches = loader.load_rows(
        rows,
        dataclasses.replace(config, data=data),
        shardings,
        order=order,
        num_batches=len(order.sizes),
    )

    @contextlib.contextmanager
    def open_parts() -> Iterator[Iterator[Part]]:
        batches.rewind()
        with batches:
            yield map(Part, order.sizes, batches)

    return EvaluationSet(open_parts, f"{order.num_rows:,} of {num_all:,} rows")


def cut_batch(
    batch: Any, batch_size: int, place: str, entries: Entries
) -> Iterator[Part]:
    """Makes full batches of one that may be smaller.

    Args:
        batch: A tree of arrays of NumPy or JAX, whose first dim is the rows; scalars
            are free.
        batch_size: Rows of the full batches.
        place: What to call the batch in messages.
        entries: What its loss asks of it.

    Yields:
        The batch itself if it is full, else its parts.

    Raises:
        DataError: It has no rows, more than a full batch, or is not what its loss asks.

    Example:
        >>> parts = cut_batch({"x": np.arange(3)}, 4, "batch", {})
        >>> [(part.num_rows, part.batch["x"].tolist()) for part in parts]
        [(2, [0, 1, 0, 1]), (1, [2, 2, 2, 2])]
    """
    batch = check_batch(batch, entries, name=place)
    num_rows = next((x.shape[0] for _, x in rows_of(batch, entries)), batch_size)
    if not 1 <= num_rows <= batch_size:
        problem = f"rows are not 1 to global_batch_size={batch_size}"
        remedy = "cut the evaluation data into such batches"
        raise DataError(Problem(place, num_rows, problem, remedy))
    if num_rows == batch_size:
        yield Part(num_rows, batch)
        return
    first = 0
    for size in part_sizes(num_rows, batch_size):
        rows = slice(first, first + size)
        first += size
        filled = functools.partial(_fill, rows=rows, times=batch_size // size)
        yield Part(size, map_rows(filled, lambda leaf: leaf, batch, entries))


def _fill(array: Any, rows: slice, times: int) -> Any:
    tile = jax.numpy.tile if isinstance(array, jax.Array) else np.tile
    return tile(array[rows], (times, *[1] * (array.ndim - 1)))


def mean_over_rows(results: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Averages what batches gave, so that each row counts once.

    Args:
        results: Of each batch the rows of its part, and its metrics: means over
            `weight` units.

    Returns:
        The weighted means, without `weight`; NaN where no row has weight.

    Example:
        >>> whole, rest = {"loss": 2.0, "weight": 1.0}, {"loss": 5.0, "weight": 1.0}
        >>> mean_over_rows([(8, whole), (4, rest)])
        {'loss': 3.0}
    """
    totals: dict[str, float] = {}
    total = 0.0
    for num_rows, metrics in results:
        weight = num_rows * float(metrics["weight"])
        total += weight
        for name in metrics.keys() - {"weight"}:
            value = weight * float(metrics[name]) if weight else 0.0
            totals[name] = totals.get(name, 0.0) + value
    return {
        name: value / total if total else math.nan for name, value in totals.items()
    }
