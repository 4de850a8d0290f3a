"""Speed of rollouts and updates, and the share of a peak that updates use."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from zjax.estimate.traced import run_flops
from zjax.rl.packing import Sampled
from zjax.run.monitor import find_peak
from zjax.settings.schema import Config
from zjax.typing import Batch, Model


class Work(NamedTuple):
    """FLOPs of a training step for each token of a text, by the length of the text."""

    fixed: float
    by_length: float
    """FLOPs of attention for each token of the text."""

    def of_texts(self, lengths: Float[np.ndarray, " texts"]) -> float:
        """Adds up the FLOPs of texts by their numbers of tokens."""
        return float((self.fixed * lengths + self.by_length * lengths**2).sum())


def token_work(model: Model, config: Config) -> Work:
    """Counts FLOPs as MFU has them: without recomputation, causal attention half.

    A token of packed texts reads the text of the token alone, and not the row.

    Args:
        model: Model with `inputs`, of rows of `data.length` tokens.
        config: Settings of the model.
    """
    work, length = run_flops(model, model.inputs, config), config.data.length
    return Work(work.products / length, work.attention / length**2)


class Speed:
    """Times rollouts and updates in turn.

    Args:
        learners: Each model that an update trains, with `inputs`, and the settings of
            that model.
        num_devices: Devices of the run.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        learners: Sequence[tuple[Model, Config]],
        num_devices: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        peak = find_peak(learners[0][1], jax.devices()[0].device_kind)
        self._peak, self._clock = peak * num_devices, clock
        # Traced only where MFU follows.
        self._work = [token_work(*each) for each in learners] if peak else []
        self._rollout_began, self._num_drawn = 0.0, 0
        self._update_began: float | None = None
        self._lengths = np.zeros(0)

    def begin_rollout(self) -> None:
        """Ends the update, if there was one, and begins a rollout."""
        self._rollout_began, self._num_drawn = self._clock(), 0

    def add_texts(self, rollouts: Sequence[Sampled]) -> None:
        """Counts texts that were drawn, whether or not these are learned from."""
        self._num_drawn += sum(len(x.ids) for x in rollouts)

    def end_rollout(self) -> dict[str, float]:
        """Returns the speed of the rollout, and of the update before."""
        seconds = self._clock() - self._rollout_began
        values = {
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": self._num_drawn / seconds,
        }
        if self._update_began is None:
            return values
        update_seconds = self._rollout_began - self._update_began
        values |= {
            "update_tokens_per_second": float(self._lengths.sum()) / update_seconds,
            "rollout_share": seconds / (seconds + update_seconds),
        }
        if self._work:
            flops = sum(each.of_texts(self._lengths) for each in self._work)
            values["update_mfu"] = flops / (update_seconds * self._peak)
        return values

    def begin_update(self, batches: Sequence[Batch]) -> None:
        """Begins the steps on some batches of `zjax.rl.pack`."""
        found = [text_lengths(batch) for batch in batches]
        self._lengths = np.concatenate([np.zeros(0), *found])
        self._update_began = self._clock()

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes enclosed work from the time of the update."""
        start = self._clock()
        try:
            yield
        finally:
            if self._update_began is not None:
                # As if the update had begun later.
                self._update_began += self._clock() - start


def text_lengths(batch: Mapping[str, Any]) -> np.ndarray:
    """Counts the tokens of each text of packed rows, int64[texts].

    Example:
        >>> text_lengths({"segment_ids": np.array([[1, 1, 2, 0], [1, 1, 1, 1]])})
        array([2, 1, 4])
    """
    ids = np.asarray(batch["segment_ids"])
    counts = [np.bincount(row)[1:] for row in ids]
    return np.concatenate(counts) if counts else np.zeros(0, np.int64)
