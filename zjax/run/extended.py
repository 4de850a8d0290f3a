"""Executors that add a teacher, step values or dropped tokens to each batch."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zjax.errors import ConfigError, DataError, Problem
from zjax.offload.compiled import Peak
from zjax.run.executor import Executor, StepNumber
from zjax.run.fused import Weights
from zjax.run.teacher import Teacher
from zjax.schedule.buckets import bucket_lengths
from zjax.schedule.dropping import DroppingSchedule, make_dropping
from zjax.schedule.step_values import StepValues
from zjax.settings.schema import Config
from zjax.sharding.plan import Plan
from zjax.stack.dropping import split_dropping
from zjax.stack.forward import runs_stack
from zjax.train.state import TrainState
from zjax.typing import DROPPING, Batch, Dropping, Metrics, Model


class ExtendedExecutor(abc.ABC):
    """Wraps an `Executor` and adds arrays to the batches of training steps.

    Args:
        executor: Executor that runs the programs.
    """

    def __init__(self, executor: Executor):
        self._executor, self._number = executor, StepNumber()
        self.state_plan: TrainState = executor.state_plan
        self.parameters: Weights = executor.parameters
        self.programs: Mapping[str, Callable[..., Any]] = executor.programs

    @abc.abstractmethod
    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds the arrays of step `number`, 1 or more, to a placed batch."""

    @abc.abstractmethod
    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of an extended batch, from the shapes of a batch."""

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step on the extended batch and donates the state."""
        number = self._number.before(state) + 1
        state, metrics = self._executor.train(state, self.extend(batch, number))
        self._number.after(state, number)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics of the batch without added arrays."""
        return self._executor.evaluate(state, batch)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are arguments of `zjax.generate`."""
        return self._executor.generate(state, tokens, **settings)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient and donates the state."""
        return self._executor.settle(state)

    def compile(
        self, program: str, batch: Batch, number: int = 1
    ) -> jax.stages.Compiled:
        """Compiles one of `programs`; training programs read the extended batch."""
        batch = batch if program == "evaluate" else self.abstract(batch, number)
        return self._executor.compile(program, batch, number)

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles a step on an extended batch and predicts peak device memory."""
        return self._executor.predict_peak(self.abstract(batch))


class DistilledExecutor(ExtendedExecutor):
    """Adds the logits of a teacher to the batches of the first steps.

    Later steps run the programs of a run without a teacher.

    Args:
        executor: Executor of the student.
        teacher: Teacher; predicted memory excludes the teacher's parameters.
        num_steps: Number of steps that learn from the teacher.
    """

    def __init__(self, executor: Executor, teacher: Teacher, num_steps: int):
        super().__init__(executor)
        self.teacher, self.num_steps = teacher, num_steps

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds the teacher's logits, or frees the teacher after `num_steps`."""
        if number <= self.num_steps:
            return self.teacher.teach(batch)
        self.teacher.release()
        return batch

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch with the teacher's logits, if the step has a teacher."""
        return self.teacher.abstract(batch) if number <= self.num_steps else batch

    def compile(
        self, program: str, batch: Batch, number: int = 1
    ) -> jax.stages.Compiled:
        """Compiles one of `programs`, and the teacher's if the step has a teacher."""
        if program != "evaluate" and number <= self.num_steps:
            # The teacher reads all tokens and all layers.
            self.teacher.compile(split_dropping(batch)[0])
        return super().compile(program, batch, number)


SCHEDULE = "schedule"
"""Name in a batch of the scalars that change from step to step."""


class ScheduledExecutor(ExtendedExecutor):
    """Adds the scheduled values of a step to each batch, as replicated scalars.

    Args:
        executor: Executor that runs the programs.
        values: Function from the number of a step, 1 or more, to values by name.
        plan: Plan of the run; places the scalars.
    """

    def __init__(self, executor: Executor, values: StepValues, plan: Plan):
        super().__init__(executor)
        self._values, self._place = values, plan.replicated

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds float32[] by name under `SCHEDULE`."""

        def place(value: float) -> jax.Array:
            # Every process knows the value: placing it needs no communication.
            x = np.float32(value)
            return jax.make_array_from_callback((), self._place, lambda _: x)

        return batch | {SCHEDULE: jax.tree.map(place, self._values(number))}

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch with the scheduled scalars."""
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=self._place)
        return batch | {SCHEDULE: dict.fromkeys(self._values(1), scalar)}


class DroppingExecutor(ExtendedExecutor):
    """Adds to the batch of a step how many tokens or layers the step drops.

    Evaluation and generation drop nothing.

    Args:
        executor: Executor that runs the programs.
        config: Settings; read for `random_ltd` and `layer_drop`.
        plan: Plan of the run; places the keep probability of the last layer.
    """

    def __init__(self, executor: Executor, config: Config, plan: Plan):
        super().__init__(executor)
        self._config, self._place = config, plan.replicated
        self._schedule = make_dropping(config)

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds a `Dropping`, unless the step drops nothing."""

        def place(x: np.float32) -> jax.Array:
            # Every process knows the value: placing it needs no communication.
            return jax.make_array_from_callback((), self._place, lambda _: x)

        length = self._schedule.lengths.at(number)
        if self._schedule.num_kept(number) < length:
            length = _length_of(batch, self._config, length)
        dropping = dropping_at(self._config, self._schedule, number, length)
        return with_dropping(batch, jax.tree.map(place, dropping))

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch with layers dropped and all tokens kept.

        Unchanged if the batch has a `Dropping` already, or the run drops no layers.
        """
        if DROPPING in batch or self._config.layer_drop.theta == 1:
            return batch
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=self._place)
        return with_dropping(batch, Dropping(theta=scalar))


def _length_of(batch: Batch, config: Config, length: int) -> int:
    """Tokens per row: the configured length, or the length of the batch's bucket."""
    lengths = {x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1}
    has_buckets = config.buckets.form != "none"
    expected = bucket_lengths(config) if has_buckets else (length,)
    found = lengths.intersection(expected)
    if not found:
        problem = f"is not that of the batch, whose rows have {sorted(lengths)} tokens"
        remedy = "set it, as random_ltd counts on it"
        raise DataError(Problem("data.length", length, problem, remedy))
    return max(found)


def dropping_at(
    config: Config, schedule: DroppingSchedule, step: int, length: int
) -> Dropping:
    """Returns the tokens and layers that step `step`, 1 or more, drops.

    Example:
        >>> from zjax.settings import schema
        >>> config = schema.Config(random_ltd=schema.RandomLTD(form="layerwise"))
        >>> dropping_at(config, make_dropping(config), 1, 1024).num_kept
        128
    """
    num_kept = min(schedule.num_kept(step), length)
    drops_layers = config.layer_drop.theta < 1
    theta = np.float32(schedule.theta_at(step)) if drops_layers else None
    if num_kept == length:
        return Dropping(theta=theta)
    return Dropping(num_kept, config.random_ltd.form == "span", theta)


def with_dropping(batch: Batch, dropping: Dropping) -> Batch:
    """Adds a `Dropping` to a batch, which must be a dict unless nothing is dropped."""
    if dropping == Dropping():
        return batch
    if not isinstance(batch, dict):
        name = "random_ltd" if dropping.num_kept else "layer_drop"
        problem, remedy = f"is no dict, to which {name} can add", "name its arrays"
        raise DataError(Problem("batch", type(batch).__name__, problem, remedy))
    return batch | {DROPPING: dropping}


def check_model(model: Model, config: Config) -> None:
    """Refuses a model that cannot drop tokens or layers while it trains."""
    form, theta = config.random_ltd.form, config.layer_drop.theta
    field, value = "random_ltd.form", form
    if form == "none":
        field, value = "layer_drop.theta", theta
    stack = model.stack
    if stack is None or not runs_stack(model):
        problem = "needs a model that is a stack of blocks"
        remedy = "set stack, and loss=zjax.loss_of(stack), of a zjax.Model"
        raise ConfigError(Problem(field, value, problem, remedy))
    memory = config.zero.optimizer_memory
    if memory != "device" and any(segment.tiles for segment in stack.segments):
        problem = f"is not built for tiles with zero.optimizer_memory={memory!r}"
        remedy = "leave Segment.tiles out, or store the state on the devices"
        raise ConfigError(Problem(field, value, problem, remedy))
    num_blocks = sum(segment.num_blocks for segment in stack.segments)
    if form != "none" and num_blocks < 3:
        problem = f"has no block between the first and the last of {num_blocks}"
        remedy = "use 'none', or more blocks"
        raise ConfigError(Problem(field, value, problem, remedy))
    if form != "none" and stack.take_tokens is None:
        problem = "needs what blocks read of a subset of the tokens"
        remedy = "set take_tokens of the zjax.Stack"
        raise ConfigError(Problem(field, value, problem, remedy))
