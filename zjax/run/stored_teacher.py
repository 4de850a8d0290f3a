"""Teacher whose outcomes are stored beside the data: no second model is in memory."""

from collections.abc import Iterator

import jax
import numpy as np

from zjax.data.taught import (
    ARRAYS,
    IDS,
    LOGPROBS,
    read_origin,
    taught_settings,
    without_outcomes,
)
from zjax.errors import ConfigError, DataError, Problem
from zjax.run.teacher import NAME, divergence_problems, scalars_of
from zjax.run.teacher_states import COMPARED
from zjax.schedule.lengths import CUTS
from zjax.schedule.training import NOTHING, Told
from zjax.settings import schema
from zjax.sharding.activations import batch_shardings
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Model


class StoredTeacher:
    """Outcomes that the loader reads with each batch of the student.

    Raises:
        ConfigError: The student reads no outcomes, or settings need a teacher's run.
        DataError: The outcomes are damaged, or of other settings.
    """

    def __init__(self, config: schema.Config, plan: Plan, student: Model):
        assert config.distill is not None
        problems = [*row_problems(config), *_misfits(config.distill, student)]
        if problems:
            raise ConfigError(*problems)
        self.settings, self._plan, self._student = config.distill, plan, student
        given = config.data, config.model.vocab_size, config.distill.temperature
        origin = read_origin(config.distill.teacher, taught_settings(*given))
        self._top_k = origin.top_k

    def teach(self, batch: Batch, told: Told = NOTHING) -> Batch:
        """Gathers what the loss reads of the teacher, from a batch on the devices."""
        if missing := [name for name in ARRAYS if name not in batch]:
            remedy = "take batches of zjax.make_loader, which reads them"
            problem = "is missing, and distill.teacher is stored for rows of data"
            raise DataError(*(Problem(x, None, problem, remedy) for x in missing))
        read = {"ids": batch[IDS], "logprobs": batch[LOGPROBS]}
        read |= scalars_of(self.settings, self._plan)
        return without_outcomes(batch) | {NAME: read}

    def abstract(self, batch: Batch, told: Told = NOTHING) -> Batch:
        """Shapes of the results of `teach`, from the shapes of a batch."""
        batch = without_outcomes(batch)
        tokens, top_k = batch["tokens"].shape, self._top_k
        read = {
            "ids": jax.ShapeDtypeStruct((*tokens, top_k), np.int32),
            "logprobs": jax.ShapeDtypeStruct((*tokens, top_k + 1), np.float32),
            "weight": jax.ShapeDtypeStruct((), np.float32),
            "temperature": jax.ShapeDtypeStruct((), np.float32),
        }
        shapes = {NAME: read}
        places = batch_shardings(self._plan, shapes, self._student.entries)
        return batch | jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            places,
        )

    def compile(self, batch: Batch, told: Told = NOTHING) -> None:
        """Compiles nothing, as no program adds the outcomes."""

    def release(self) -> None:
        """Frees nothing, as no parameters are in memory."""


def row_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields settings under which steps do not read the rows of the data."""
    warmup, kind = config.sequence_warmup, config.model.kind
    found = {
        "buckets": config.buckets is not None,
        "sequence_warmup": isinstance(warmup, CUTS),
        "model.kind": kind != "decoder",
    }
    problem = "trains on other rows than a stored teacher has read"
    remedy = "leave it out, or distil from the run of the teacher"
    for name in (name for name, is_wrong in found.items() if is_wrong):
        value = kind if name == "model.kind" else getattr(config, name).kind
        yield Problem(name, value, problem, remedy)


def _misfits(settings: schema.Distill, student: Model) -> Iterator[Problem]:
    """Yields reasons why a student cannot learn from stored outcomes alone."""
    path = settings.teacher
    if IDS not in student.entries:
        problem = f"has no effect on a model whose entries lack {IDS!r}"
        remedy = "use a built-in model"
        yield Problem("distill.teacher", path, problem, remedy)
    yield from divergence_problems(settings, student)
    layers = {"hidden": settings.hidden, "attention": settings.attention}
    for name in (name for name, section in layers.items() if section):
        problem = "compares layers, and distill.teacher stores the last outcomes alone"
        remedy = f"set distill.{name} to None, or give the run of the teacher"
        yield Problem(f"distill.{name}", COMPARED[name], problem, remedy)
    if settings.memory != "device":
        problem = "has no effect on a stored teacher, which has no parameters"
        yield Problem("distill.memory", settings.memory, problem, "leave it out")
