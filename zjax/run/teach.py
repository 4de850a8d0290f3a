"""Stores the outcomes of a teacher for the rows that a student learns from."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Int64

from zjax.data.curriculum import Curriculum
from zjax.data.draws import Order, Sampler
from zjax.data.packing import Rows
from zjax.data.placement import BatchPlacement, place_batch
from zjax.data.source import digest_samples, open_rows
from zjax.data.taught import (
    MAX_TOP_K,
    OutcomeWriter,
    is_stored,
    make_origin,
    stage_rows,
    taught_settings,
)
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.build import make_model
from zjax.ops.divergence import outcomes_of
from zjax.ops.token_chunks import join_chunks, logits_of, over_chunks, split_chunks
from zjax.run.batch import end_by_epochs
from zjax.run.stored_teacher import row_problems
from zjax.run.teacher import NAME, Teacher
from zjax.run.trainer_settings import checked_settings
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan
from zjax.typing import Batch, Device


def store_outcomes(
    config: schema.Config,
    output: str,
    top_k: int,
    *,
    devices: Sequence[Device] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> int:
    """Stores the outcomes of `distill.teacher` for the rows of the stage.

    Parts of an earlier call are kept.

    Args:
        config: Settings of the student's run.
        output: Directory to write, or to go on with.
        top_k: Number of most likely tokens to store for each token, 1 or more.
        devices: Devices to use; all by default.
        report: Function of a line on the progress.

    Returns:
        Number of rows whose outcomes are stored.

    Raises:
        ConfigError: No run is a teacher, or settings that cannot work.
        DataError: Data that is missing or malformed.
        CheckpointError: The teacher cannot be read.
    """
    devices = jax.devices() if devices is None else devices
    if problems := [*_problems(config, top_k)]:
        raise ConfigError(*problems)
    directory = pathlib.Path(local_path("--output", output, creates=True))
    config, _ = end_by_epochs(config, None, len(devices))
    config = checked_settings(config, None, None, None, None, devices)
    passes = _Passes(_alone(config), top_k, devices)
    rows = open_rows(config, "train")
    numbers = stage_rows(_order_of(config, rows), TrainingSchedule(config).num_taught)
    distill = passes.teacher.settings
    origin = make_origin(
        taught_settings(config.data, config.model.vocab_size, distill.temperature),
        rows,
        teacher=passes.teacher.digest,
        top_k=top_k,
        num_rows=len(numbers),
        batch_size=config.global_batch_size,
    )
    writer = OutcomeWriter(directory, origin, numbers)
    missing, number = writer.missing_parts(), len(origin.parts)
    if len(missing) < number:
        report(f"{number - len(missing)} of {number} parts are there already")
    for part in missing:
        places = origin.parts[part]
        writer.write(part, *passes.outcomes(rows, numbers[places.start : places.stop]))
        report(f"part {part + 1} of {number}: {len(places):,} rows")
    return len(numbers)


def _problems(config: schema.Config, top_k: int) -> Iterator[Problem]:
    """Yields settings by which no outcomes can be stored."""
    vocab_size, distill = config.model.vocab_size, config.distill
    if not 1 <= top_k <= min(MAX_TOP_K, vocab_size):
        problem = f"is out of range for {vocab_size} tokens"
        remedy = f"use 1 to {min(MAX_TOP_K, vocab_size)}"
        yield Problem("--top_k", top_k, problem, remedy)
    if not distill or not distill.teacher:
        remedy = "give the directory of the teacher's run"
        yield Problem("distill.teacher", "", "names no teacher", remedy)
    elif is_stored(distill.teacher):
        problem, remedy = "holds outcomes already", "give the teacher's run"
        yield Problem("distill.teacher", distill.teacher, problem, remedy)
    yield from row_problems(config)


def _order_of(config: schema.Config, rows: Rows) -> Order:
    """Makes the order in which the run draws rows."""
    if config.curriculum.metrics:
        return Curriculum(config, digest_samples(config.data, rows)).sampler
    return Sampler(config.seed, len(rows), config.global_batch_size)


def _alone(config: schema.Config) -> schema.Config:
    """Returns settings of a student that compares nothing but outcomes."""
    assert config.distill is not None
    distill = dataclasses.replace(config.distill, hidden=None, attention=None)
    return dataclasses.replace(config, distill=distill)


class _Passes:
    """Passes of a teacher over rows of data."""

    def __init__(self, config: schema.Config, top_k: int, devices: Sequence[Device]):
        model = make_model(config)
        self._mesh = meshes.make_mesh(config.mesh, devices)
        plan = make_plan(config, self._mesh, model, optax.set_to_zero())
        self.teacher = Teacher(config, plan, model)
        self._placement = BatchPlacement(plan.batch_sharding, model.entries)
        self._batch_size = config.global_batch_size
        self._program = jax.jit(
            functools.partial(
                _top_outcomes,
                top_k=top_k,
                chunk_tokens=config.model.loss_chunk_tokens,
                num_shards=(plan.num_batch_shares, 1),
            )
        )

    def outcomes(
        self, rows: Rows, numbers: Int64[np.ndarray, " R"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the outcomes of rows, as `OutcomeWriter.write` takes them."""
        found, size = [], self._batch_size
        for first in range(0, len(numbers), size):
            # The last rows are read again to fill the batch.
            places = np.minimum(np.arange(first, first + size), len(numbers) - 1)
            batch = rows.read(numbers[places])
            computed = self._run(place_batch(batch, self._placement, size, "rows"))
            found.append([np.asarray(x)[: len(numbers) - first] for x in computed])
        ids, logprobs = map(np.concatenate, zip(*found, strict=True))
        return ids, logprobs

    def _run(self, batch: Batch) -> Any:
        """Computes the outcomes of a placed batch."""
        with jax.set_mesh(self._mesh), dtype_promotion():
            told = self.teacher.teach(batch)[NAME]
            names = ("hidden", "head", "temperature")
            computed = self._program(*(told[name] for name in names))
            # Collectives of two programs can deadlock on simulated devices.
            return jax.block_until_ready(computed)


def _top_outcomes(
    hidden: Float[Array, "B L N"],
    head: Float[Array, "V N"],
    temperature: Float[Array, ""],
    *,
    top_k: int,
    chunk_tokens: int,
    num_shards: tuple[int, int],
) -> tuple[Int[Array, "B L K"], Float[Array, "B L K1"]]:
    """Finds the most likely tokens, and log-probabilities of the outcomes."""

    def add_chunk(nothing, chunk):
        log_p = jax.nn.log_softmax(logits_of(chunk, head) / temperature)
        _, ids = jax.lax.top_k(log_p, top_k)
        return nothing, (ids, outcomes_of(log_p, ids))

    chunks = split_chunks(hidden, num_shards=num_shards, chunk_tokens=chunk_tokens)
    _, (ids, logprobs) = over_chunks(add_chunk, (), chunks)
    shape = hidden.shape[0], hidden.shape[1]
    join = functools.partial(join_chunks, shape=shape, num_shards=num_shards)
    return join(ids), join(logprobs)
