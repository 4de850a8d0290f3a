"""Batches of a run: sizes, rows of epochs, and what the schedule says of a step."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.data import batches as wrapping
from zjax.data.source import open_rows
from zjax.data.taught import without_outcomes
from zjax.errors import ConfigError, DataError, Problem
from zjax.run.stored_teacher import StoredTeacher
from zjax.run.teacher import Teacher
from zjax.schedule.lengths import beside_problems, epoch_problems, steps_of
from zjax.schedule.training import ScheduledStep, TrainingSchedule
from zjax.settings import choices, schema
from zjax.settings.batch import resolve_batch
from zjax.settings.ranges import range_problems
from zjax.settings.schema import Config
from zjax.sharding.mesh import BATCH_AXES, mesh_sizes
from zjax.sharding.plan import Plan
from zjax.stack.forward import runs_stack
from zjax.typing import Batch, Dropping, Model, StepBatch


def with_batch_sizes(config: Config, num_devices: int) -> Config:
    """Fills in the three batch sizes of a config for a number of devices."""
    sizes = mesh_sizes(config.mesh, num_devices)
    batch = resolve_batch(config, math.prod(sizes[axis] for axis in BATCH_AXES))
    return dataclasses.replace(config, **dataclasses.asdict(batch))


def abstract_batch(config: Config, plan: Plan) -> Batch:
    """Global batch of a built-in model: shapes [B, L] and dtypes without data."""
    size = resolve_batch(config, plan.num_batch_shares).global_batch_size
    shape = (size, config.data.length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def end_by_epochs(
    config: schema.Config, batches: Any, num_devices: int
) -> tuple[schema.Config, str]:
    """Replaces `num_epochs` by the `num_steps` that draw as many rows.

    Returns the settings with `num_epochs=0` and a description of the count; unchanged
    settings and an empty text without epochs.
    """
    epochs = config.num_epochs
    if not epochs:
        return config, ""
    # Runs before the config is checked.
    problems = [*range_problems(config), *beside_problems(config)]
    problems += epoch_problems(config, user_batches=batches is not None)
    problems += wrapping.batches_problems("batches", batches)
    if problems:
        raise ConfigError(*problems)
    num_rows = _count_rows(config, batches)
    size = config.global_batch_size
    # 0 leaves the batch size to the number of devices.
    size = size or with_batch_sizes(config, num_devices).global_batch_size
    num_steps = steps_of(epochs, num_rows, size)
    counted = dataclasses.replace(config, num_steps=num_steps, num_epochs=0.0)
    text = f"num_epochs={epochs:g} of {num_rows:,} rows: {num_steps:,} steps"
    return counted, text


def _count_rows(config: schema.Config, batches: Any) -> int:
    """Counts the training rows of a run."""
    if batches is None:
        return len(open_rows(config, "train"))
    given = wrapping.with_columns(batches)
    if isinstance(given, wrapping.ColumnDataset):
        return len(wrapping.ColumnRows(given))
    problem = "needs the number of rows, which ready batches do not say"
    remedy = "set num_steps, or give a dataset or a list of rows"
    raise ConfigError(Problem("num_epochs", config.num_epochs, problem, remedy))


SCHEDULE = "schedule"
"""Name in a batch of the scalars that change from step to step."""


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """Makes the `StepBatch` of each step: adds logits of the teacher and scalars.

    Evaluation reads batches as the data gives them, and drops nothing.
    """

    schedule: TrainingSchedule
    replicated: jax.sharding.NamedSharding
    teacher: Teacher | StoredTeacher | None = None

    @property
    def adds_nothing(self) -> bool:
        """Whether batches of all steps stay as they are."""
        return not self.teacher and not self.schedule.adds_inputs

    def extend(self, batch: Batch, number: int) -> StepBatch:
        """Makes the batch of step `number`, 1 or more, from a placed batch."""

        def place(value: float) -> jax.Array:
            # Every process knows the value: placing it needs no communication.
            x = np.float32(value)
            return jax.make_array_from_callback((), self.replicated, lambda _: x)

        step = self._step(batch, number)
        extended = _with_scalars(batch, step, place)
        if self.teacher and step.has_teacher:
            extended = self.teacher.teach(extended, step.told)
        elif self.teacher:
            self.teacher.release()
            extended = without_outcomes(extended)
        return StepBatch(extended, self._dropping(step, place))

    def abstract(self, batch: Batch, number: int | None = None) -> StepBatch:
        """Shapes of the batch of a step; `number=None` is step 1 with all tokens."""
        step = self._step(batch, number)
        extended = _with_scalars(batch, step, self._shape)
        if self.teacher and step.has_teacher:
            extended = self.teacher.abstract(extended, step.told)
        elif self.teacher:
            # The batch may be of a step of the stage, before the program's step.
            extended = without_outcomes(extended)
        return StepBatch(extended, self._dropping(step, self._shape))

    def compile_teacher(self, batch: Batch, number: int | None = None) -> None:
        """Compiles the teacher's program for shapes of a batch, if the step has one."""
        step = self._step(batch, number)
        if self.teacher and step.has_teacher:
            # The teacher reads all tokens and all layers.
            scalars = _with_scalars(batch, step, self._shape)
            self.teacher.compile(scalars, step.told)

    def _shape(self, value: float) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), np.float32, sharding=self.replicated)

    def _step(self, batch: Batch, number: int | None) -> ScheduledStep:
        """Values of a step for the tokens per row of a batch."""
        step = self.schedule.at(number or 1)
        if number is None:
            return step._replace(num_kept=step.length)
        if step.num_kept == step.length:
            return step
        # With buckets, the batch alone tells the length.
        expected = {step.length}
        if self.schedule.has_buckets:
            expected = {length for _, length in self.schedule.shapes}
        lengths = {x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1}
        if not (found := lengths.intersection(expected)):
            problem = f"is not that of the batch, whose rows have {sorted(lengths)} "
            remedy = "set it, as random_ltd counts on it"
            raise DataError(
                Problem("data.length", step.length, f"{problem}tokens", remedy)
            )
        return self.schedule.at(number, max(found))

    def _dropping(
        self, step: ScheduledStep, scalar: Callable[[float], Any]
    ) -> Dropping:
        """Tokens and layers that a step drops, with the probability as a `scalar`."""
        theta = None if step.theta is None else scalar(step.theta)
        if step.num_kept == step.length:
            return Dropping(theta=theta)
        return Dropping(step.num_kept, self.schedule.drops_span, theta)


def _with_scalars(
    batch: Batch, step: ScheduledStep, scalar: Callable[[float], Any]
) -> Batch:
    """Adds float32[] by name under `SCHEDULE`, if the model reads scalars of steps."""
    if not step.traced:
        return batch
    return batch | {SCHEDULE: {n: scalar(x) for n, x in step.traced.items()}}


def check_model(model: Model, config: Config) -> None:
    """Refuses a model that cannot drop tokens or layers while it trains."""
    field = "random_ltd" if config.random_ltd else "layer_drop.theta"
    value = choices.value_at(config, field)
    stack = model.stack
    if stack is None or not runs_stack(model):
        problem = "needs a model that is a stack of blocks"
        remedy = "set stack, and loss=zjax.loss_of(stack), of a zjax.Model"
        raise ConfigError(Problem(field, value, problem, remedy))
    memory = config.zero.optimizer_memory
    if memory != "device" and any(segment.tiles for segment in stack.segments):
        problem = f"is not built for tiles with zero.offload={memory!r}"
        remedy = "leave Segment.tiles out, or store the state on the devices"
        raise ConfigError(Problem(field, value, problem, remedy))
    num_blocks = sum(segment.num_blocks for segment in stack.segments)
    if config.random_ltd and num_blocks < 3:
        problem = f"has no block between the first and the last of {num_blocks}"
        remedy = "use None, or more blocks"
        raise ConfigError(Problem(field, value, problem, remedy))
    if config.random_ltd and stack.take_tokens is None:
        problem = "needs what blocks read of a subset of the tokens"
        remedy = "set take_tokens of the zjax.Stack"
        raise ConfigError(Problem(field, value, problem, remedy))
