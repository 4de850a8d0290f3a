"""Steps that leave out tokens of middle layers, or whole layers."""

import jax
import numpy as np

from zjax.config.buckets import bucket_lengths
from zjax.config.dropping import DroppingSchedule, make_dropping
from zjax.config.schema import Config
from zjax.errors import ConfigError, DataError, Problem
from zjax.execute.executor import Executor
from zjax.execute.extended import ExtendedExecutor
from zjax.forward import runs_stack
from zjax.sharding.plan import Plan
from zjax.typing import DROPPING, Batch, Dropping, Model


class DroppingExecutor(ExtendedExecutor):
    """Adds to the batch of a step what the step leaves out.

    Evaluation and generation leave out nothing.

    Args:
        executor: Runs the programs.
        config: Read for `random_ltd` and `layer_drop`.
        plan: Plan of the run; places the probability of the last layer.
    """

    def __init__(self, executor: Executor, config: Config, plan: Plan):
        super().__init__(executor)
        self._config, self._place = config, plan.replicated
        self._schedule = make_dropping(config)

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds a `Dropping`, unless nothing is left out."""

        def place(x: np.float32) -> jax.Array:
            # Every process knows the number, and places it without the others.
            return jax.make_array_from_callback((), self._place, lambda _: x)

        length = self._schedule.lengths.at(number)
        if self._schedule.num_kept(number) < length:
            length = _length_of(batch, self._config, length)
        dropping = dropping_at(self._config, self._schedule, number, length)
        return with_dropping(batch, jax.tree.map(place, dropping))

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch on all tokens, unless it says which are left out."""
        if DROPPING in batch or self._config.layer_drop.theta == 1:
            return batch
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=self._place)
        return with_dropping(batch, Dropping(theta=scalar))


def _length_of(batch: Batch, config: Config, length: int) -> int:
    """Tokens per row: those that the schedule counts on, or those of a bucket.

    Raises:
        DataError: No array of the batch has as many tokens per row.
    """
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
    """What a step leaves out.

    Args:
        config: Read for `random_ltd.form` and `layer_drop.theta`.
        schedule: The schedule of `config`.
        step: Number of the step, from 1.
        length: Tokens per row of its batch.

    Example:
        >>> from zjax.config import schema
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
    """A batch with what its step leaves out; unchanged for nothing.

    Raises:
        DataError: The batch is not a dict.
    """
    if dropping == Dropping():
        return batch
    if not isinstance(batch, dict):
        name = "random_ltd" if dropping.num_kept else "layer_drop"
        problem, remedy = f"is no dict, to which {name} can add", "name its arrays"
        raise DataError(Problem("batch", type(batch).__name__, problem, remedy))
    return batch | {DROPPING: dropping}


def check_model(model: Model, config: Config) -> None:
    """Refuses a model whose training cannot leave out tokens or layers.

    Raises:
        ConfigError: It has no stack, another loss than that of its stack, or blocks
            without a subset of their tokens.
    """
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
