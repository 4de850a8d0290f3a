"""The programs of a run: pure functions with the shardings they are compiled for.

The plain case runs `train`, one program. A run whose update happens elsewhere or at
another time composes `gradients` and `update` itself.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config.schema import Config
from zjax.parallel import schedule as schedules
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.placement import pad_tree, shardings, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.average import averaged
from zjax.train.gradients.automatic import (
    compute_dtype,
    make_forward,
    params_in_use,
    whole_gradients,
)
from zjax.train.gradients.local import share_gradients
from zjax.train.gradients.pipelined import (
    PipelinedModel,
    pipelined_forward,
    pipelined_gradients,
)
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule, loss_scale_of, make_update
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True)
class Programs:
    """Pure functions of arrays; `jit` them with `state_shardings`.

    Args:
        gradients: `gradients(state, batch) -> (grads, loss)`.
        update: `update(state, grads, loss, batch) -> (state, metrics)`.
        train: `train(state, batch) -> (state, metrics)`, the two above in one.
        evaluate: `evaluate(state, batch) -> metrics`; uses the averaged parameters
            where they are kept.
        state_shardings: A TrainState of NamedSharding.
    """

    gradients: Callable[[TrainState, Batch], tuple[Params, Loss]]
    update: Callable[[TrainState, Params, Loss, Batch], tuple[TrainState, Metrics]]
    train: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Metrics]
    state_shardings: TrainState


def make_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    *,
    num_microbatches: int,
    schedule: Schedule | None = None,
) -> Programs:
    """Builds the programs of a run.

    The random key of a step depends on the seed and the step alone, not on the mesh.

    Args:
        model: Its loss.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `seed`, `optimizer`, `precision` and `pipeline`.
        num_microbatches: Gradient accumulation, 1 or more.
        schedule: Learning rate by applied step, for the metrics.

    Returns:
        Functions that nothing has compiled yet.
    """
    gradients = make_gradients(model, plan, config, num_microbatches)
    loss_of, loss_with = make_losses(model, plan, config, num_microbatches)
    update = make_update(tx, plan, config, schedule)

    def step_key(state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.key(config.seed), state.step)

    def gradients_of(state: TrainState, batch: Batch) -> tuple[Params, Loss]:
        key, scale = step_key(state), loss_scale_of(state)
        return gradients(state, batch, key, scale)

    def update_with(
        state: TrainState, grads: Params, loss: Loss, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        def value_fn(master: Params) -> jax.Array:
            key = step_key(state)
            return loss_with(master, state.model_state, batch, key).value

        return update(state, grads, loss, value_fn)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return update_with(state, *gradients_of(state, batch), batch)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        average = averaged(state, plan)
        if average is None:
            loss = loss_of(state, batch)
        else:
            loss = loss_with(average, state.model_state, batch, None)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}

    rows = state_rows(plan, config)
    return Programs(gradients_of, update_with, train, evaluate, shardings(rows))


def make_gradients(
    model: Model, plan: Plan, config: Config, num_microbatches: int
) -> Callable[..., tuple[Params, Loss]]:
    """Chooses who adds the gradients of the devices: the compiler, or we.

    Args:
        model: Its loss, and whether it is separable.
        plan: Places every array.
        config: Read for `precision.reduce_dtype` and `pipeline`.
        num_microbatches: Gradient accumulation, 1 or more.

    Returns:
        `gradients(state, batch, key, scale) -> (grads, loss)`.
    """
    wide = config.precision.reduce_dtype == "float32"
    dtype = jnp.float32 if wide else compute_dtype(plan)
    sizes = plan.mesh.shape
    if sizes[PIPELINE] > 1:
        pipelined = pipelined_model(model, plan, config, num_microbatches)
        staged = pipelined_gradients(pipelined, plan, reduce_dtype=dtype)
        return lambda state, *inputs: staged(state.master, state.model_state, *inputs)
    splits_batch_alone = plan.num_batch_shares == math.prod(sizes.values()) > 1
    # Layers in a loop fetch their parameters inside it, which the compiler arranges.
    looped = plan.stage >= 3 and model.loops_over_layers
    by_hand = (wide and plan.num_batch_shares > 1) or (
        model.separable and splits_batch_alone and not looped
    )
    if by_hand and not plan.is_offloaded:
        shared = share_gradients(model, plan, num_microbatches, reduce_dtype=dtype)
        return lambda state, *inputs: shared(state.master, state.model_state, *inputs)
    whole = whole_gradients(model, plan, num_microbatches)
    return lambda state, *inputs: whole(
        kept_params(model, plan, state), state.model_state, *inputs
    )


def make_losses(
    model: Model, plan: Plan, config: Config, num_microbatches: int
) -> tuple[Callable[..., Loss], Callable[..., Loss]]:
    """Chooses how the loss is computed without gradients.

    Args:
        model: Its loss.
        plan: Places every array.
        config: Read for `pipeline`.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        `loss_of(state, batch)`, in evaluation, and `loss_with(master, model_state,
        batch, key)` of other parameters in their logical shapes.
    """
    if plan.mesh.shape[PIPELINE] > 1:
        pipelined = pipelined_model(model, plan, config, num_microbatches)
        staged = pipelined_forward(pipelined, plan)
        return (
            lambda state, batch: staged(state.master, state.model_state, batch, None),
            lambda master, *inputs: staged(pad_tree(master, plan.master), *inputs),
        )
    forward = make_forward(model, plan, num_microbatches)

    def loss_of(state: TrainState, batch: Batch) -> Loss:
        params = kept_params(model, plan, state)
        return forward(params, state.model_state, batch, None)

    def loss_with(master: Params, *inputs: Any) -> Loss:
        return forward(params_in_use(model, plan, master), *inputs)

    return loss_of, loss_with


def pipelined_model(
    model: Model, plan: Plan, config: Config, num_microbatches: int
) -> PipelinedModel:
    """A model with the schedule of its stages.

    Args:
        model: It has a stack.
        plan: Its mesh says how many stages there are.
        config: Read for `pipeline`, and for `model.remat` of the built-in models.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        What the pipelined programs are built from.
    """
    schedule = make_pipeline_schedule(config, plan, num_microbatches)
    keeps = None if config.model.remat == "none" else model.keeps
    return PipelinedModel(model, schedule, config.pipeline.recompute, keeps)


def make_pipeline_schedule(
    config: Config, plan: Plan, num_microbatches: int
) -> schedules.Schedule:
    """The passes of a step that a run asks for.

    Args:
        config: Read for `pipeline`.
        plan: Its mesh says how many stages there are.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        Tables of passes.
    """
    given = config.pipeline
    return schedules.make_schedule(
        given.schedule,
        num_stages=plan.mesh.shape[PIPELINE],
        num_microbatches=num_microbatches,
        num_chunks=given.num_chunks if given.schedule == "interleaved" else 1,
    )


def kept_params(model: Model, plan: Plan, state: TrainState) -> Params:
    """The parameters in use: as they are kept, or else made from the master weights.

    Args:
        model: Says whether it takes its layers apart.
        plan: Places them.
        state: Of the run.

    Returns:
        Parameters in the compute dtype and their logical shapes.
    """
    if state.params != ():
        return unpad_tree(state.params, plan.compute)
    return params_in_use(model, plan, unpad_tree(state.master, plan.master))
