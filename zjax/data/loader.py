"""Loader of batches on the devices, prefetched; the position is a step number.

grain reads the rows, in threads or worker processes, and runs the thread that places
the batches. The state of grain is not used: the batch of step n is a pure function of
n, and a loader resumes by restarting at a step.
"""

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import Int64

from zjax.data import draws as sampler
from zjax.data import masking, packing, placement, source
from zjax.data.buckets import Buckets
from zjax.data.curriculum import Curriculum
from zjax.data.draws import Draws, Order, ReshapedRows, TruncatedRows, WholeRows
from zjax.data.entries import check_batch
from zjax.data.sums import digest_tokens
from zjax.data.taught import (
    TaughtDraws,
    is_stored,
    open_outcomes,
    stage_rows,
    taught_settings,
)
from zjax.errors import ConfigError, DataError, Problem, check_installed, describe_exit
from zjax.schedule.training import TrainingSchedule
from zjax.settings import renamed, schema

_LOST_WORKER = re.compile(r"Worker process was terminated .* exit code (-?\d+)")
"""Matches grain's error for a worker process that has ended."""
READ_THREADS = 2
"""Batches that each worker process reads at a time."""


@runtime_checkable
class Batches(Protocol):
    """Batches of a training loop, in an order that a run resumes."""

    @property
    def description(self) -> str:
        """Text for the log that describes the batches."""
        ...

    @property
    def shape_at(self) -> Callable[[int], tuple[int, int]] | None:
        """Function from a step to rows and tokens per row, if the data decide both."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Returns the iterator itself."""
        ...

    def __next__(self) -> Any:
        """Returns the batch of the next step."""
        ...

    def __enter__(self) -> "Batches":
        """Returns the iterator, which is closed at the end of the block."""
        ...

    def __exit__(self, *error: object) -> None:
        """Ends all threads."""
        ...

    def close(self) -> None:
        """Ends all threads; the next batch starts them again."""
        ...

    @property
    def values_at(self) -> Callable[[int], dict[str, float]]:
        """Function from a step to metrics that the batches alone tell."""
        ...

    def state(self) -> dict[str, Any]:
        """Position as values of JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position."""
        ...


class Loader:
    """Iterator of batches of global arrays that knows its step.

    Args:
        open_at: Function from a step to an iterator of batches with a `close` method.
        position: Values besides the step that determine the samples, compared at
            resume.
        values_at: Function from a step, from 1 on, to metrics of the step by name.
        shape_at: Function from a step, from 1 on, to rows and tokens per row of the
            batch, if the data decide both.
        description: Text for the log that describes the data before the run.
        drawn: Digests of all batches before each step, filled in by an iterator that
            draws batches in order.
    """

    def __init__(
        self,
        open_at: Callable[[int], Any],
        position: dict[str, Any],
        start_step: int,
        *,
        values_at: Callable[[int], dict[str, float]] = lambda step: {},
        shape_at: Callable[[int], tuple[int, int]] | None = None,
        description: str = "",
        drawn: dict[int, str] | None = None,
        num_workers: int = 0,
    ):
        self._num_workers = num_workers
        check_installed("grain")
        self._open_at = open_at
        self.values_at, self.shape_at = values_at, shape_at
        self.description = description
        self._position = position
        self._step = start_step
        self._drawn = {} if drawn is None else drawn
        self._saved_digest: str | None = None
        self._open: list[Any] = []
        # Also runs at exit: a thread that places arrays would crash the interpreter.
        weakref.finalize(self, _close_all, self._open)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._open:
            self._open.append(self._open_at(self._step))
        try:
            batch = next(self._open[0])
        # Ctrl-C and the end of the data close the threads, too.
        except BaseException as error:
            self.close()
            if lost := _LOST_WORKER.search(str(error)):
                raise _lost_worker(self._num_workers, int(lost[1])) from error
            raise
        self._check_drawn()
        # list(): the prefetching thread adds digests meanwhile.
        for step in [step for step in list(self._drawn) if step <= self._step]:
            del self._drawn[step]
        self._step += 1
        return batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all threads and processes; the next batch restarts all."""
        _close_all(self._open)

    def rewind(self) -> None:
        """Returns to step 0."""
        self.close()
        self._step = 0

    def state(self) -> dict[str, Any]:
        """Position of the loader: next `step`, and values that determine the data."""
        drawn = {"drawn": self._drawn[self._step]} if self._step in self._drawn else {}
        return {"step": self._step} | self._position | drawn

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to the position of another loader of equal data.

        Raises if the data, the order or the batch size differ, as steps would be other
        samples.
        """
        step = state.get("step") if isinstance(state, dict) else None
        # A checkpoint may be damaged, and True is an int, too.
        if type(step) is not int or not 0 <= step < 2**31:
            problem, remedy = "is not a data position", "start from another checkpoint"
            raise DataError(Problem("data/step", step, problem, remedy))
        kept, olds = renamed.find(state)
        # Last, as None says that a section is off.
        olds.sort(key=lambda old: old.present is None)
        present = kept | {old.path: old.present for old in olds}
        saved = {n: x for n, x in present.items() if n not in ("step", "drawn")}
        changed = [n for n in sorted(saved) if self._position.get(n) != saved[n]]
        # A feature that is switched off has no settings: naming the switch suffices.
        known = [name for name in changed if name in self._position] or changed
        problems = [
            Problem(
                name,
                self._position.get(name),
                f"was {saved[name]!r} in the saved run, so its samples are not these",
                "restore that setting or that data, or start a new run",
            )
            for name in known
        ]
        if problems:
            raise DataError(*problems)
        # Checkpoints of an earlier zjax hold fewer values.
        unknown = [name for name in self._position if name not in saved]
        if unknown:
            logging.warning("the checkpoint does not say its %s", ", ".join(unknown))
        self.close()
        self._step = step
        self._saved_digest = state.get("drawn")

    def _check_drawn(self) -> None:
        """Warns if the batches drawn to resume differ from the saved run."""
        # Only the first batch after a resume is compared.
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

    With `data.num_workers`, guard the script by `if __name__ == "__main__":`, since
    each worker process imports the script.

    Args:
        config: Config; reads `data`, `seed`, `global_batch_size` (1 or more),
            `distill`, and `kind` and `vocab_size` of `model`.
        shardings: Sharding of each array of a batch.
        start_step: Step of the first batch.
        num_batches: Number of batches; None is endless.

    Returns:
        Iterator of `tokens, targets` (int32[B, L]) and `weights` (float32[B, L]), with
        `segment_ids, positions` (int32[B, L]) if documents are packed. For an encoder,
        targets are the tokens before they were masked. In the steps that a stored
        teacher teaches, also `teacher/ids` and `teacher/logprobs` (`zjax.data.taught`).

    Raises:
        DataError: The data is missing, damaged, too short for one row, or has a larger
            vocabulary than the model; or no token can hide the tokens of an encoder.
    """
    data, vocab_size, seed = config.data, config.model.vocab_size, config.seed
    warmup, size = config.sequence_warmup, config.global_batch_size
    check_batch_size(size)
    if settings := config.buckets:
        opened = source.open_documents(data, "train", vocab_size)
        source.check_no_answers(opened, "buckets", settings.kind, None)
        buckets = Buckets(opened.tokens, opened.offsets, settings, config)
        digest = digest_tokens(opened.tokens, opened.offsets)
        return load_draws(
            buckets,
            data,
            shardings,
            position=source.row_settings(data)
            | source.order_settings(warmup)
            | buckets.position
            | _position(seed, len(opened.offsets) - 1, size, digest),
            shape_at=buckets.shape_at,
            description=buckets.describe(),
            start_step=start_step,
            num_batches=num_batches,
        )
    rows = source.open_rows(config, "train")
    schedule = TrainingSchedule(config)
    position = _position(seed, len(rows), size, rows.digest())
    position |= source.row_settings(data)
    position |= source.order_settings(warmup, schedule.shapes)
    order: Order = sampler.Sampler(seed, len(rows), size)
    values_at = _no_values
    if config.curriculum.metrics:
        curriculum = Curriculum(config, source.digest_samples(data, rows))
        order, values_at = curriculum.sampler, curriculum.values
        position |= curriculum.position
    draws: Draws = WholeRows(rows, order, (size,))
    if isinstance(warmup, schema.Truncate):
        draws = TruncatedRows(rows, order, schedule)
    elif isinstance(warmup, schema.Reshape):
        draws = ReshapedRows(rows, order, data.length, schedule)
    if config.model.kind == "encoder":
        rule = masking.make_rule(data, vocab_size, seed)
        draws = masking.MaskedDraws(draws, rule)
        position |= {"data.masking": [rule.fraction, rule.mask_id]}
    distill = config.distill
    if distill and is_stored(distill.teacher):
        settings = taught_settings(data, vocab_size, distill.temperature)
        outcomes = open_outcomes(distill.teacher, settings, rows)
        outcomes.check_rows(stage_rows(order, schedule.num_taught))
        draws = TaughtDraws(draws, outcomes, schedule.num_taught)
        position |= {"distill.teacher": outcomes.origin.digest()}
    return load_draws(
        draws,
        data,
        shardings,
        position=position,
        values_at=values_at,
        start_step=start_step,
        num_batches=num_batches,
    )


def _position(seed: int, num_rows: int, batch_size: int, digest: str) -> dict[str, Any]:
    """Values that determine the rows and the order, compared at resume."""
    return {
        "seed": seed,
        "num_rows": num_rows,
        "global_batch_size": batch_size,
        "data.digest": digest,
    }


def _no_values(step: int) -> dict[str, float]:
    return {}


def sample_rows(
    rows: packing.Rows,
    data: schema.Data,
    shardings: placement.Shardings,
    *,
    seed: int,
    batch_size: int,
    position: dict[str, Any] | None = None,
    start_step: int = 0,
    num_batches: int | None = None,
) -> Loader:
    """Makes the loader of any rows, in the order of `seed`; see `load_draws`.

    `position` are values compared at resume besides rows, seed and batch size.
    """
    check_batch_size(batch_size)
    order = sampler.Sampler(seed, len(rows), batch_size)
    return load_draws(
        WholeRows(rows, order, (batch_size,)),
        data,
        shardings,
        position=_position(seed, len(rows), batch_size, rows.digest())
        | (position or {}),
        start_step=start_step,
        num_batches=num_batches,
    )


def load_draws(
    draws: Draws,
    data: schema.Data,
    shardings: placement.Shardings,
    *,
    position: dict[str, Any] | None = None,
    values_at: Callable[[int], dict[str, float]] = _no_values,
    shape_at: Callable[[int], tuple[int, int]] | None = None,
    description: str = "",
    start_step: int = 0,
    num_batches: int | None = None,
) -> Loader:
    """Makes the loader of any rows that can be read by number.

    `data` gives workers and prefetching, `position` the values compared at resume.
    """
    example = draws.draw(start_step).rows
    sizes = set(draws.sizes)
    # Computed once per batch size, in this process: workers see no devices.
    local_rows = {size: find_local_rows(example, size, shardings) for size in sizes}
    # grain's sources need a length, so endless data has the largest number.
    end = sys.maxsize if num_batches is None else start_step + num_batches

    def place(read: tuple[int, dict[str, np.ndarray]]) -> dict[str, jax.Array]:
        num_rows, batch = read
        return placement.place_rows(batch, local_rows[num_rows], num_rows, shardings)

    def open_at(step: int) -> Any:
        import grain

        _mark_flags_as_parsed()
        steps = StepSource(draws, local_rows, step, end)
        dataset = _read_batches(grain.MapDataset.source(steps), data.num_workers)
        return iter(
            grain.experimental.ThreadPrefetchIterDataset(
                dataset.map(place), prefetch_buffer_size=data.prefetch_batches
            )
        )

    return Loader(
        open_at,
        position or {},
        start_step,
        values_at=values_at,
        shape_at=shape_at,
        description=description,
        num_workers=data.num_workers,
    )


def _lost_worker(num_workers: int, code: int) -> DataError:
    """Makes the error for a worker process that has ended."""
    problem = f"lost a worker process ({describe_exit(code)})"
    remedy = "use fewer or give them more memory, and run again"
    return DataError(Problem("data.num_workers", num_workers, problem, remedy))


def _close_all(opened: list[Any]) -> None:
    """Closes and drops iterators: grain's iterators cannot be deleted late at exit."""
    while opened:
        opened.pop().close()


def check_batch_size(global_batch_size: int) -> None:
    """Refuses a batch size of 0, which has not been derived yet."""
    if global_batch_size == 0:
        problem = "is not a number of rows until it is derived"
        remedy = "give the config that `zjax.initialize` returns, or set it"
        raise ConfigError(Problem("global_batch_size", 0, problem, remedy))


class StepSource:
    """Random-access source for grain: the local rows of the batch of each step.

    Args:
        draws: Draws of the rows of each step.
        local_rows: Positions in the global batch that this process holds, by number of
            rows in the batch.
    """

    def __init__(
        self,
        draws: Draws,
        local_rows: dict[int, Int64[np.ndarray, " local"]],
        start_step: int,
        end_step: int,
    ):
        self._draws = draws
        self._local_rows = local_rows
        self._start_step = start_step
        self._end_step = end_step

    def __len__(self) -> int:
        return max(0, self._end_step - self._start_step)

    def __getitem__(self, index: int) -> tuple[int, dict[str, np.ndarray]]:
        rows, indices = self._draws.draw(self._start_step + int(index))
        local = indices[self._local_rows[len(indices)]]
        return len(indices), rows.read(local)


def find_local_rows(
    rows: packing.Rows, num_rows: int, shardings: placement.Shardings
) -> Int64[np.ndarray, " local"]:
    """Lists the rows of a global batch of which this process holds any part, ascending.

    Every process holds all rows if the devices that shard the batch are in every
    process, as with a pipeline over processes.
    """
    example = rows.read(np.zeros(1, np.int64))
    # Faults of columns are told before the first batch, by one row.
    check_batch(example, placement.entries_in(shardings), name="batches")
    shapes = {
        name: jax.ShapeDtypeStruct((num_rows, *array.shape[1:]), array.dtype)
        for name, array in example.items()
    }
    return placement.needed_rows(
        [(shardings(leaf), leaf.shape) for leaf in shapes.values()],
        jax.local_devices(),
    )


def _read_batches(steps: Any, num_workers: int) -> Any:
    """Reads elements in threads, of this process or of worker processes."""
    import grain

    read = steps.to_iter_dataset(
        grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_THREADS)
    )
    if num_workers == 0:
        return read
    return read.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))


def _mark_flags_as_parsed() -> None:
    """Lets grain start processes from a program that is not an absl app."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
