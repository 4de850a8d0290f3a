"""Updates: the batches that a run makes of its own texts, in order, and resumable."""

import collections
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zjax.errors import DataError, Problem
from zjax.rl import rollout_files
from zjax.rl.stopping import RolloutStopped

Values = Mapping[str, float]


class Update(NamedTuple):
    """The batch of one optimizer step."""

    batch: Mapping[str, Any]
    """Arrays [B, L] on the host, in nested dicts."""
    values: Values
    """Metrics of the rollout that the batch is of."""


class Updates:
    """Iterator of the batches of a run, which draws a rollout where none is left.

    Takes the place of a `Loader`. What is left of a rollout is a file beside the
    checkpoint of the step: batches hold log-probabilities of weights that have moved
    since, which no later pass can compute again.

    Args:
        draw: Function from the number of the next prompt to the updates of a rollout,
            and the number of the next prompt after it.
        place: Function that places a batch on the devices.
        directory: Directory of the run, which has a folder of the files.
        description: Text for the log that describes the rollouts.
        position: Settings and data that decide the texts, compared when a run resumes.
        half_learned: Settings that decide what is learned of a text, compared when a
            run resumes within a rollout.
        num_shares: Devices over which the rows of a batch are split.
        num_microbatches: Microbatches into which the rows of a device are split.
    """

    shape_at: Callable[[int], tuple[int, int]] | None = None

    def __init__(
        self,
        draw: Callable[[int], tuple[Sequence[Update], int]],
        place: Callable[[Any], Any],
        directory: pathlib.Path,
        position: Mapping[str, Any],
        half_learned: Mapping[str, Any] | None = None,
        description: str = "",
        *,
        num_shares: int = 1,
        num_microbatches: int = 1,
    ):
        self._draw, self._place = draw, place
        self._directory = directory / rollout_files.FOLDER
        self._position, self.description = dict(position), description
        self._half_learned = dict(half_learned or {})
        self._num_shares, self._num_microbatches = num_shares, num_microbatches
        self._step, self._next_prompt = 0, 0
        self._left: collections.deque[Update] = collections.deque()
        self._values: dict[int, Values] = {}
        self.failure: DataError | None = None
        """Why no rollout could be drawn: the run is saved before it ends by this."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._left:  # no text of a rollout may be left to learn from
            try:
                updates, self._next_prompt = self._draw(self._next_prompt)
            except RolloutStopped as error:  # the same texts are drawn by a later run
                raise StopIteration from error
            except DataError as error:  # such as rewards that all failed
                self.failure = error
                raise StopIteration from error
            self._left.extend(updates)
        batch, values = self._left.popleft()
        self._step += 1
        # Metrics are read one step late.
        self._values = {self._step: values} | {
            step: x for step, x in self._values.items() if step == self._step - 1
        }
        return self._place(batch)

    def __enter__(self) -> "Updates":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing: no thread reads ahead of the weights."""

    def values_at(self, step: int) -> dict[str, float]:
        """Metrics of the rollout of a step, the newest or the one before."""
        return dict(self._values.get(step, {}))

    def state(self) -> dict[str, Any]:
        """Writes what is left of the rollout; returns the position as JSON."""
        state = {"step": self._step, "next_prompt": self._next_prompt}
        left = None
        # All processes have the batches, and process 0 writes the checkpoint.
        if self._left and jax.process_index() == 0:
            path = rollout_files.path_at(self._directory, self._step)
            left = {
                **rollout_files.write(path, [x.batch for x in self._left]),
                "values": [dict(x.values) for x in self._left],
                "settings": self._half_learned,
            }
        return state | self._position | {"left": left}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to the position of a checkpoint, with what was left of the rollout.

        Raises:
            DataError: Other prompts or settings, a file that is missing or damaged, or
                devices and microbatches that do not divide the rows of a half-learned
                rollout.
        """
        problems = [
            Problem(
                name,
                value,
                f"was {state.get(name)!r} in the saved run, so its texts are not these",
                "restore that setting or that data, or start a new run",
            )
            for name, value in self._position.items()
            if state.get(name) != value
        ]
        left = state.get("left")
        drawn = left["settings"] if left else self._half_learned
        problems += [
            Problem(
                name,
                self._half_learned.get(name),
                f"was {drawn.get(name)!r} for the rollout that is half learned",
                "restore it, or continue from a checkpoint between two rollouts",
            )
            for name in sorted({*drawn, *self._half_learned})
            if drawn.get(name) != self._half_learned.get(name)
        ]
        if problems:
            raise DataError(*problems)
        self._left = collections.deque[Update]()
        if left:
            batches = rollout_files.read(self._directory, left)
            self._check_rows({len(batch["tokens"]) for batch in batches})
            self._left.extend(map(Update, batches, left["values"]))
        self._step, self._next_prompt = state["step"], state["next_prompt"]

    def _check_rows(self, sizes: set[int]) -> None:
        """Refuses batches whose rows do not divide over devices and microbatches."""
        count, shares = self._num_microbatches, self._num_shares
        odd = sorted(size for size in sizes if size % (count * shares))
        if odd:
            problem = f"on {shares} batch shards does not divide the "
            problem += f"{' and '.join(map(str, odd))} rows of batches of the rollout "
            problem += "that is half learned"
            remedy = "use the devices and the microbatches of the saved run, or "
            remedy += "continue from a checkpoint between two rollouts"
            raise DataError(Problem("num_microbatches", count, problem, remedy))

    def forget(self, steps: Sequence[int]) -> None:
        """Removes the files of all steps but `steps`, whose checkpoints remain."""
        if jax.process_index() == 0:
            rollout_files.forget(self._directory, steps)
