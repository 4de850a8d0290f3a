"""Rows of pre-training beside the texts of each step, from the data of the run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zjax.data import source
from zjax.data.draws import Sampler
from zjax.errors import ConfigError, Problem
from zjax.rl.pretraining_loss import KEY
from zjax.settings import schema
from zjax.typing import IGNORED


class Pretraining:
    """Adds rows of `data` to batches; row and order depend on seed and step alone.

    Args:
        config: Checked settings, with `rl.pretraining`.

    Attributes:
        num_rows: Rows of a step.
        position: Data and settings that decide the rows, compared at resume.

    Raises:
        ConfigError: The number of rows does not divide over devices and microbatches.
        DataError: The data is missing, or too short for a row.
    """

    def __init__(self, config: schema.Config):
        assert config.rl is not None and config.rl.pretraining is not None
        multiple = config.global_batch_size // config.microbatch_size
        # A number of the devices would tie a run to these when it goes on.
        self.num_rows = config.rl.pretraining.num_rows or config.global_batch_size
        if self.num_rows % multiple:
            problem = f"does not divide over {multiple} shares and microbatches"
            remedy = f"use a multiple of {multiple}, or 0"
            field = "rl.pretraining.num_rows"
            raise ConfigError(Problem(field, self.num_rows, problem, remedy))
        self._rows = source.open_rows(config, "train")
        self._order = Sampler(config.seed, len(self._rows), self.num_rows)
        self.position: dict[str, Any] = {
            "rl.pretraining.num_rows": self.num_rows,
            "data.digest": self._rows.digest(),
            **source.row_settings(config.data),
        }

    def extend(self, batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Appends the rows of a step to a batch of `zjax.rl.pack`.

        Args:
            batch: Arrays on the host, with the units of the step's texts.
            step: Number of steps before.

        Returns:
            The batch with `num_rows` more rows, of weight 0 for the policy, and the
            array `pretraining` under `rl`.
        """
        read = _with_segments(self._rows.read(self._order.indices(step)))
        counts = (read["targets"] != IGNORED) * read["weights"]
        given = {
            **{name: read[name] for name in ("tokens", "segment_ids", "positions")},
            "targets": np.where(counts > 0, read["targets"], IGNORED),
        }
        # Rows of a long prompt may have no answer: their loss is 0, of all places.
        counts = counts if counts.any() else np.ones_like(counts)
        units, shares = batch["rl"]["units"].sum(), counts / counts.sum()
        # A step whose texts have no reward learns from its rows alone: the mean is not
        # half of a mean over both.
        given_to = {"units": units * shares, KEY: units * shares}
        if not units:
            given_to = {"units": shares, KEY: shares / 2}
        arrays = {**batch["rl"], KEY: np.zeros_like(batch["weights"])}
        nothing = np.zeros_like(shares)
        arrays = {
            name: _joined(x, given_to.get(name, nothing)) for name, x in arrays.items()
        }
        extended = {name: _joined(batch[name], x) for name, x in given.items()}
        extended["weights"] = _joined(batch["weights"], np.zeros_like(shares))
        if "experts" in batch:  # routers choose for tokens without a record, -1
            known = batch["experts"]
            unknown = np.full((len(shares), *known.shape[1:]), -1, known.dtype)
            extended["experts"] = _joined(known, unknown)
        return {**extended, "rl": arrays}


def _with_segments(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes one segment of each row of blocks, which has no document in it."""
    shape = rows["tokens"].shape
    places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return {"segment_ids": np.ones(shape, np.int32), "positions": places} | rows


def _joined(x: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Appends rows in the dtype of an array."""
    return np.concatenate([x, more.astype(x.dtype)])
