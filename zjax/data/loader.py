"""Batches on the devices, read ahead of their use; the position is a step number.

grain reads the rows, in threads or in processes of its own, and runs the thread that
places them. It is never asked where it is: the batch of step n is a pure function of n,
so a loader resumes by starting anew at its step.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import Int64

from zjax.config import schema
from zjax.data import packing, placement, sampler, source
from zjax.data.entries import check_batch
from zjax.errors import ConfigError, DataError, Problem
from zjax.packages import check_installed

READ_THREADS = 2
"""Batches that each reading process works on at a time."""


@runtime_checkable
class Order(Protocol):
    """Which rows make up the global batch of a step."""

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Lists the rows of one step, in the order they stand in the batch."""
        ...


class Loader:
    """An iterator of batches of global arrays that knows its step.

    Args:
        open_at: Starts reading at a step; gives an iterator with a `close`.
        position: What, besides the step, decides which samples come; it is compared
            when a state is restored.
        start_step: Step of the first batch.
        drawn: Filled by the iterator: by step, a digest of the batches before it, where
            batches are drawn in order.
    """

    def __init__(
        self,
        open_at: Callable[[int], Any],
        position: dict[str, Any],
        start_step: int,
        *,
        drawn: dict[int, str] | None = None,
    ):
        check_installed("grain")
        self._open_at = open_at
        self._position = position
        self._step = start_step
        self._drawn = {} if drawn is None else drawn
        self._saved_digest: str | None = None
        self._open: list[Any] = []
        # Also runs at exit: a thread that places arrays while the interpreter goes down
        # would crash it.
        weakref.finalize(self, _close_all, self._open)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._open:
            self._open.append(self._open_at(self._step))
        try:
            batch = next(self._open[0])
        except BaseException:
            self.close()
            raise
        self._check_drawn()
        for step in [step for step in list(self._drawn) if step <= self._step]:
            del self._drawn[step]
        self._step += 1
        return batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all threads and processes; the next batch would start them again."""
        _close_all(self._open)

    def rewind(self) -> None:
        """Goes back to step 0."""
        self.close()
        self._step = 0

    def state(self) -> dict[str, Any]:
        """Says where the loader is: the `step` of the next batch, and which data."""
        drawn = {"drawn": self._drawn[self._step]} if self._step in self._drawn else {}
        return {"step": self._step} | self._position | drawn

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another loader of the same data was.

        Args:
            state: What `state` gave.

        Raises:
            DataError: The data, its order or the batch size differ, so the same step
                would be other samples; or it is no state.
        """
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is not int or not 0 <= step < 2**31:
            problem, remedy = "is no data position", "start from another checkpoint"
            raise DataError(Problem("data/step", step, problem, remedy))
        saved = {name: x for name, x in state.items() if name not in ("step", "drawn")}
        problems = [
            Problem(
                name,
                self._position.get(name),
                f"was {saved[name]!r} in the saved run, so its samples are not these",
                "restore that setting or that data, or start a new run",
            )
            for name in sorted(saved)
            if self._position.get(name) != saved[name]
        ]
        if problems:
            raise DataError(*problems)
        unknown = [name for name in self._position if name not in saved]
        if unknown:
            logging.warning("the checkpoint does not say its %s", ", ".join(unknown))
        self.close()
        self._step = step
        self._saved_digest = state.get("drawn")

    def _check_drawn(self) -> None:
        saved, self._saved_digest = self._saved_digest, None
        if saved is not None and saved != self._drawn.get(self._step):
            logging.warning(
                "batches: the first %d are not those of the saved run", self._step
            )


def make_loader(
    config: schema.Config,
    shardings: placement.Shardings,
    *,
    start_step: int = 0,
    num_batches: int | None = None,
) -> Loader:
    """Makes the loader of the training data that `config` names.

    With `data.num_workers`, the script that runs must guard its work by
    `if __name__ == "__main__":`, since each worker process imports it.

    Args:
        config: `data`, `seed`, `global_batch_size` (1 or more) and `model.vocab_size`.
        shardings: Where each array of a batch goes.
        start_step: Step of the first batch.
        num_batches: Batches until the end; None goes on for ever.

    Returns:
        An iterator of `tokens, targets` (int32[B, L]) and `weights` (float32[B, L]),
        with `segment_ids, positions` (int32[B, L]) where documents are packed.

    Raises:
        DataError: The data is missing, damaged, too short for one row, or has a larger
            vocabulary than the model.
    """
    return sample_rows(
        source.open_rows(config, "train"),
        config,
        shardings,
        made_from=source.row_settings(config),
        start_step=start_step,
        num_batches=num_batches,
    )


def sample_rows(
    rows: packing.Rows,
    config: schema.Config,
    shardings: placement.Shardings,
    *,
    made_from: dict[str, Any] | None = None,
    start_step: int = 0,
    num_batches: int | None = None,
) -> Loader:
    """Makes the loader of any rows in the order of `config.seed`.

    Args:
        rows: The rows.
        config: `seed`, and as for `load_rows`.
        shardings: Where each array of a batch goes.
        made_from: Settings that the rows follow from, to be compared at resume.
        start_step: Step of the first batch.
        num_batches: Batches until the end; None goes on for ever.
    """
    check_batch_size(config)
    seed, num_rows, size = config.seed, len(rows), config.global_batch_size
    position = {"seed": seed, "num_rows": num_rows, "global_batch_size": size}
    return load_rows(
        rows,
        config,
        shardings,
        order=sampler.Sampler(seed, num_rows, size),
        position=position | (made_from or {}) | {"data.digest": rows.digest()},
        start_step=start_step,
        num_batches=num_batches,
    )


def load_rows(
    rows: packing.Rows,
    config: schema.Config,
    shardings: placement.Shardings,
    *,
    order: Order,
    position: dict[str, Any] | None = None,
    start_step: int = 0,
    num_batches: int | None = None,
) -> Loader:
    """Makes the loader of any rows that can be read by number.

    Args:
        rows: The rows.
        config: `data.num_workers`, `data.prefetch_batches` and `global_batch_size`.
        shardings: Where each array of a batch goes.
        order: Which of them each step takes.
        position: What the order follows from, to be compared at resume.
        start_step: Step of the first batch.
        num_batches: Batches until the end; None goes on for ever.
    """
    num_rows = config.global_batch_size
    local_rows = find_local_rows(rows, num_rows, shardings)
    end = sys.maxsize if num_batches is None else start_step + num_batches

    def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return placement.place_rows(batch, local_rows, num_rows, shardings)

    def open_at(step: int) -> Any:
        import grain

        _mark_flags_as_parsed()
        steps = StepSource(rows, order, local_rows, step, end)
        dataset = _read_ahead(grain.MapDataset.source(steps), config.data)
        return iter(
            grain.experimental.ThreadPrefetchIterDataset(
                dataset.map(place), prefetch_buffer_size=config.data.prefetch_batches
            )
        )

    return Loader(open_at, position or {}, start_step)


def _close_all(opened: list[Any]) -> None:
    """Leaves no reference: grain's iterators cannot be deleted late in an exit."""
    while opened:
        opened.pop().close()


def check_batch_size(config: schema.Config) -> None:
    """Refuses a batch size that has not been derived yet.

    Raises:
        ConfigError: `global_batch_size` is 0.
    """
    if config.global_batch_size == 0:
        said = "is not a number of rows until it is derived"
        remedy = "give the config that `zjax.initialize` returns, or set it"
        raise ConfigError(Problem("global_batch_size", 0, said, remedy))


class StepSource:
    """What grain reads: element i is this process's part of the batch of a step.

    Args:
        rows: The rows of the whole data.
        order: Which of them each step takes.
        local_rows: Places in the global batch that this process holds.
        start_step: Step of element 0.
        end_step: Step after the last element.
    """

    def __init__(
        self,
        rows: packing.Rows,
        order: Order,
        local_rows: Int64[np.ndarray, " local"],
        start_step: int,
        end_step: int,
    ):
        self._rows = rows
        self._order = order
        self._local_rows = local_rows
        self._start_step = start_step
        self._end_step = end_step

    def __len__(self) -> int:
        return max(0, self._end_step - self._start_step)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        indices = self._order.indices(self._start_step + int(index))
        return self._rows.read(indices[self._local_rows])


def find_local_rows(
    rows: packing.Rows, num_rows: int, shardings: placement.Shardings
) -> Int64[np.ndarray, " local"]:
    """Lists the rows of a global batch of which this process holds any part.

    Args:
        rows: Any rows, to read one of.
        num_rows: Rows of the global batch.
        shardings: Where each array of a batch goes.

    Returns:
        Their numbers, ascending: all of them where the devices that split the batch
        are in every process, as where a pipeline goes through several.
    """
    example = rows.read(np.zeros(1, np.int64))
    check_batch(example, placement.entries_in(shardings), name="batches")
    shapes = {
        name: jax.ShapeDtypeStruct((num_rows, *array.shape[1:]), array.dtype)
        for name, array in example.items()
    }
    return placement.needed_rows(
        [(shardings(leaf), leaf.shape) for leaf in shapes.values()],
        jax.local_devices(),
    )


def _read_ahead(steps: Any, data: schema.Data) -> Any:
    import grain

    read = steps.to_iter_dataset(
        grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_THREADS)
    )
    if data.num_workers == 0:
        return read
    return read.mp_prefetch(grain.MultiprocessingOptions(num_workers=data.num_workers))


def _mark_flags_as_parsed() -> None:
    """Lets grain start processes from a program that is not an absl app."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
