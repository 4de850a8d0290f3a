"""Data of the user: datasets with columns, and iterables of batches."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from zjax.data import loader, placement, sums
from zjax.data.entries import check_batch
from zjax.errors import DataError, Problem, check_installed
from zjax.settings import schema


@runtime_checkable
class ColumnDataset(Protocol):
    """A dataset with the methods of a Hugging Face `Dataset`."""

    column_names: Any

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> Any: ...


def batches_problems(field: str, batches: Any) -> Iterator[Problem]:
    """Yields a problem for an argument that is neither a dataset nor batches."""
    kind, remedy = type(batches).__name__, "give a dataset or a list of batches"
    if _are_rows(batches):
        yield from _row_problems(field, batches)
    elif isinstance(batches, list | tuple) and batches and _is_flat(batches[0]):
        problem = "holds lists of tokens, which do not say what is predicted"
        remedy = f'give {field}=[{{"tokens": row[:-1], "targets": row[1:]}} for row in '
        yield Problem(field, kind, problem, f"{remedy}rows]")
    elif isinstance(batches, Mapping):
        problem = "is a mapping"
        remedy = f"give one of its values, such as {field}[{next(iter(batches), '')!r}]"
        if any(hasattr(value, "dtype") for value in batches.values()):
            problem, remedy = "is a single batch", "give a list of batches"
        yield Problem(field, kind, problem, remedy)
    elif isinstance(batches, str | bytes):
        yield Problem(field, batches, "is a text", remedy)
    elif isinstance(batches, type):  # a class has the methods of instances
        remedy = "call it, and give what it returns"
        yield Problem(field, batches.__name__, "is a class", remedy)
    elif batches is None or isinstance(batches, ColumnDataset):
        return
    elif callable(batches) and not hasattr(batches, "__iter__"):
        name = getattr(batches, "__name__", kind)
        problem, remedy = "is a function", "call it, and give what it returns"
        yield Problem(field, name, problem, remedy)
    elif not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        yield Problem(field, kind, "cannot be iterated over", remedy)


def wrap_batches(
    batches: Any,
    config: schema.Config,
    shardings: placement.Shardings,
    *,
    start_step: int = 0,
    num_batches: int | None = None,
) -> loader.Loader:
    """Makes a loader of a dataset with columns, or of any iterable of batches.

    A dataset (`column_names`, `len`, `dataset[[3, 1]] -> dict of columns`) is sampled
    by (seed, step) like built-in data, and so is a list of rows: dicts of lists of
    numbers. Any other iterable must yield global batches, equal in every process. To
    resume, it is read from the start, and a warning tells if the batches before
    `start_step` differ from the saved run.

    Args:
        batches: Dataset, list of rows, or iterable of trees of numeric arrays whose
            first dim is `global_batch_size` (scalars are allowed).
        config: Config; reads `seed`, `global_batch_size`, and `data` for workers and
            prefetching.
        shardings: Sharding of each array of a batch.
        start_step: Step of the first batch.
        num_batches: Number of batches; None is as many as there are.

    Raises:
        DataError: A dataset without rows, or with a column that is not numeric; rows of
            unequal lengths; a batch of another size, when it is drawn.
    """
    batches = with_columns(batches)
    if isinstance(batches, ColumnDataset):
        return loader.sample_rows(
            ColumnRows(batches),
            config.data,
            shardings,
            seed=config.seed,
            batch_size=config.global_batch_size,
            start_step=start_step,
            num_batches=num_batches,
        )

    loader.check_batch_size(config.global_batch_size)
    end = None if num_batches is None else start_step + num_batches
    num_rows = config.global_batch_size
    opened: list[Any] = []
    drawn: dict[int, str] = {}

    def open_at(step: int) -> Any:
        iterator = iter(batches)
        # An iterator returns itself: reading from the start is impossible the second
        # time.
        if iterator is batches and opened:
            raise DataError(
                Problem(
                    "batches",
                    type(batches).__name__,
                    "is an iterator that has been drawn from",
                    "give an iterable that starts anew, such as a list",
                )
            )
        opened.append(step)
        chain = sums.BatchChain()

        def draw() -> Iterator[tuple[int, Any]]:
            for number, batch in enumerate(itertools.islice(iterator, end)):
                # Keyed by the step after the batch, the `step` of a saved position.
                drawn[number + 1] = chain.add(batch)
                # Earlier batches are drawn for the digest, and to advance the iterator.
                if number >= step:
                    yield number, batch

        def place(numbered: tuple[int, Any]) -> Any:
            number, batch = numbered
            return placement.place_batch(
                batch, shardings, num_rows, f"batches[{number}]"
            )

        return prefetch(draw(), place, config.data.prefetch_batches)

    return loader.Loader(
        open_at, {"global_batch_size": num_rows}, start_step, drawn=drawn
    )


def with_columns(batches: Any, field: str = "batches") -> Any:
    """Wraps a list of rows as a dataset; returns any other argument unchanged."""
    if not _are_rows(batches):
        return batches
    if problems := list(_row_problems(field, batches)):
        raise DataError(*problems)
    return RowList(batches)


def _are_rows(batches: Any) -> bool:
    """Whether a list holds rows: dicts with a field that is a flat list."""
    if not isinstance(batches, list | tuple) or not batches:
        return False
    first = batches[0]
    return isinstance(first, Mapping) and any(map(_is_flat, first.values()))


def _is_flat(value: Any) -> bool:
    """Whether a value is a list of numbers."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(each, int | float) for each in value)


def _row_problems(field: str, rows: Sequence[Any]) -> Iterator[Problem]:
    """Yields a problem for the first row with another shape than row 0."""
    shape = _shape_of(rows[0])
    for number, row in enumerate(rows):
        if (other := _shape_of(row)) != shape:
            problem = f"is not of the shape {shape} of row 0"
            remedy = "give all rows the same fields and lengths, such as by padding"
            yield Problem(f"{field}[{number}]", other, problem, remedy)
            return


def _shape_of(row: Any) -> dict[str, tuple[int, ...]] | str:
    """Shapes of the fields of a row, by name; the type of any other value."""
    if not isinstance(row, Mapping):
        return type(row).__name__
    return {name: np.shape(value) for name, value in sorted(row.items())}


class RowList:
    """Rows in memory, of equal shape, with the methods of a `ColumnDataset`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self._rows = rows
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, indices: Sequence[int], /) -> dict[str, list[Any]]:
        """Collects the rows `indices` of each column."""
        return {n: [self._rows[i][n] for i in indices] for n in self.column_names}


def prefetch(
    iterator: Iterator[Any], place: Callable[[Any], Any], num_batches: int
) -> Any:
    """Maps `place` over an iterator in a thread that reads `num_batches` ahead."""
    check_installed("grain")
    import grain

    return iter(
        grain.experimental.ThreadPrefetchIterDataset(
            _as_dataset(iterator).map(place),
            prefetch_buffer_size=num_batches,
        )
    )


class ColumnRows:
    """Rows of a dataset with columns; an empty dataset is refused."""

    def __init__(self, dataset: ColumnDataset):
        if len(dataset) == 0:
            name = type(dataset).__name__
            raise DataError(
                Problem("batches", name, "has no rows", "give one with rows")
            )
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Stacks the rows `indices` of each column."""
        columns = self._dataset[indices.tolist()]
        stacked = {name: _stack(values) for name, values in columns.items()}
        return check_batch(stacked, {}, name="batches")

    def digest(self) -> str:
        """Checksum of a sample of the rows."""
        return sums.digest_columns(self.read, len(self))


def _as_dataset(iterator: Iterator[Any]) -> Any:
    """Wraps an iterator for grain's prefetching; can be read once."""
    import grain

    class GivenIterator(grain.DatasetIterator):
        def __next__(self) -> Any:
            return next(iterator)

        def get_state(self) -> dict[str, Any]:  # grain's prefetch asks for a state
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            raise NotImplementedError("a loader starts anew instead")

    class GivenBatches(grain.IterDataset):
        def __iter__(self) -> grain.DatasetIterator:
            return GivenIterator()

    return GivenBatches()


def _stack(values: Any) -> np.ndarray:
    """Stacks values; rows of unequal length give an array of objects."""
    try:
        return np.asarray(values)
    except ValueError:  # unequal lengths, which `check_batch` refuses by name
        return np.asarray(values, object)
