"""Updates: the batches that a run makes of its own texts, in order, and resumable."""

import collections
import hashlib
import io
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zjax.errors import DataError, Problem
from zjax.files import new_file, writing

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
        directory: Directory of the files.
        description: Text for the log that describes the rollouts.
        position: Settings and data that decide the texts, compared when a run resumes.
        half_learned: Settings that decide what is learned of a text, compared when a
            run resumes within a rollout.
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
    ):
        self._draw, self._place, self._directory = draw, place, directory
        self._position, self.description = dict(position), description
        self._half_learned = dict(half_learned or {})
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
        if self._left:
            path, arrays = self._path(self._step), [x.batch for x in self._left]
            left = {
                "file": path.name,
                "sha256": _write(path, arrays),
                "bytes": path.stat().st_size,
                "values": [dict(x.values) for x in self._left],
                "settings": self._half_learned,
            }
        return state | self._position | {"left": left}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to the position of a checkpoint, with what was left of the rollout.

        Raises:
            DataError: Other prompts or settings, or a file that is missing or damaged.
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
        self._left = collections.deque(self._read(left) if left else ())
        self._step, self._next_prompt = state["step"], state["next_prompt"]

    def forget(self, steps: Sequence[int]) -> None:
        """Removes files of other steps than these, whose checkpoints are kept."""
        kept = {self._path(step) for step in steps}
        for path in self._directory.glob("*.npz"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / f"{step}.npz"

    def _read(self, left: Mapping[str, Any]) -> Iterator[Update]:
        """Yields the updates that a file holds, after a check of all bytes."""
        path = self._directory / left["file"]
        try:
            content = _read_bytes(path, left["bytes"])
        except OSError as error:
            problem, remedy = f"cannot be read ({error.strerror})", _REMEDY
            raise DataError(Problem("rollout", str(path), problem, remedy)) from error
        if hashlib.sha256(content).hexdigest() != left["sha256"]:
            problem = "is not the file that the checkpoint was saved with"
            raise DataError(Problem("rollout", str(path), problem, _REMEDY))
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            flat = {name: file[name] for name in file.files}
        for number, values in enumerate(left["values"]):
            yield Update(_nested(flat, f"{number}/"), values)


_REMEDY = "restore the file, or continue from another checkpoint"


def _read_bytes(path: pathlib.Path, size: int) -> bytes:
    """Reads at most a byte more than a file should have."""
    with path.open("rb") as file:
        return file.read(size + 1)


def _write(path: pathlib.Path, batches: Sequence[Mapping[str, Any]]) -> str:
    """Writes batches, completely or not at all; returns the checksum of the file."""
    flat = {
        os.fspath(pathlib.PurePosixPath(str(number), *(part.key for part in keys))): x
        for number, batch in enumerate(batches)
        for keys, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    with writing(path), new_file(path) as partial:
        with partial.open("wb") as file:
            np.savez(file, **flat)
        return hashlib.sha256(partial.read_bytes()).hexdigest()


def _nested(flat: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """Returns the arrays below a prefix in nested dicts."""
    batch: dict[str, Any] = {}
    for name, x in flat.items():
        if name.startswith(prefix):
            *outer, last = name.removeprefix(prefix).split("/")
            inner = batch
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = x
    return batch
