"""The programs of a run: pure functions with the shardings of all arrays."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.parallel import pipeline_schedule as schedules
from zjax.settings.schema import Pipeline, Zero
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.placement import pad_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.average import averaged
from zjax.train.compute_params import compute_dtype, compute_params_by_layer
from zjax.train.gradients import AutomaticGradients, local_gradients
from zjax.train.pipelined import PipelinedModel, pipelined_gradients
from zjax.train.state import TrainState, stored_compute
from zjax.train.update import loss_scale_of
from zjax.typing import Batch, Loss, Metrics, Model, Params, StepBatch


@dataclasses.dataclass(frozen=True)
class GradientPrograms:
    """The loss of a run and the gradients, as pure functions.

    Args:
        gradients: `gradients(state, step, key, scale) -> (grads, loss)`; gradients of
            `scale` times the mean loss, in logical shapes, and the unscaled loss.
        evaluate: `evaluate(state, batch) -> Loss`, without gradients or a key.
        loss: `loss(master, model_state, step, key) -> Loss`, of any parameters in
            logical shapes; `step` is a `StepBatch`.
    """

    gradients: Callable[..., tuple[Params, Loss]]
    evaluate: Callable[[TrainState, Batch], Loss]
    loss: Callable[..., Loss]


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """The inputs of every strategy.

    Args:
        reduces_in_float32: Whether gradients are reduced in float32.
        recomputes: Whether backward passes of a built-in model recompute anything.
        drops_tokens: Whether middle layers train on some tokens (random-LTD).
    """

    model: Model
    plan: Plan
    num_microbatches: int
    reduces_in_float32: bool
    zero: Zero
    pipeline: Pipeline
    recomputes: bool
    drops_tokens: bool

    @property
    def reduce_dtype(self) -> Any:
        """Dtype in which `shard_map` reduces gradients."""
        return jnp.float32 if self.reduces_in_float32 else compute_dtype(self.plan)


def make_gradients(settings: GradientSettings) -> GradientPrograms:
    """Returns the functions of the first strategy in `STRATEGIES` that applies."""
    return next(make(settings) for applies, make in STRATEGIES if applies(settings))


def is_local(settings: GradientSettings) -> bool:
    """Whether devices differentiate local rows, and reduce by `shard_map`.

    True if `precision.reduce_dtype` asks for float32, or if the communication is then
    exactly as in the ZeRO paper.
    """
    model, plan = settings.model, settings.plan
    if plan.is_offloaded or plan.num_batch_shares == 1:
        return False
    splits_batch_alone = plan.num_batch_shares == math.prod(plan.mesh.shape.values())
    # The compiler gathers the parameters of layers that run in a loop.
    is_looped = plan.splits.compute and model.loops_over_layers
    is_exact = model.separable and splits_batch_alone and not is_looped
    if (plan.is_coded or plan.has_secondary_partition) and not is_exact:
        raise PlanError(_not_exact(settings))
    return settings.reduces_in_float32 or is_exact


def _not_exact(settings: GradientSettings) -> Problem:
    """Explains why a run cannot use the collectives of ZeRO++."""
    names = "secondary_partition", "quantized_weights", "quantized_gradients"
    name = next(name for name in names if getattr(settings.zero.messages, name))
    if settings.model.loops_over_layers:
        problem = "gathers the layers one by one, and the model loops over them"
        remedy = "use False, or model.layers_per_scan=0"
    else:
        problem = "needs a loss that is a mean over rows"
        remedy = "use False, or a zjax.Model with separable=True"
    return Problem(f"zero.replicas.{name}", True, problem, remedy)


def pipelined_programs(settings: GradientSettings) -> GradientPrograms:
    """Returns the programs of `zjax.train.pipelined`."""
    plan = settings.plan
    pipelined = pipelined_gradients(
        pipelined_model(settings), plan, reduce_dtype=settings.reduce_dtype
    )

    def gradients(state: TrainState, *inputs: Any) -> tuple[Params, Loss]:
        return pipelined.gradients(state.master, state.model_state, *inputs)

    def evaluate(state: TrainState, batch: Batch) -> Loss:
        return pipelined.loss(state.master, state.model_state, StepBatch(batch), None)

    def loss(master: Params, *inputs: Any) -> Loss:
        return pipelined.loss(pad_tree(master, plan.master), *inputs)

    return GradientPrograms(gradients, evaluate, loss)


def local_programs(settings: GradientSettings) -> GradientPrograms:
    """Returns local gradients of `zjax.train.gradients`, with automatic evaluation."""
    local = local_gradients(
        settings.model,
        settings.plan,
        settings.num_microbatches,
        reduce_dtype=settings.reduce_dtype,
    )

    def gradients(state: TrainState, *inputs: Any) -> tuple[Params, Loss]:
        return local(state.master, state.model_state, *inputs)

    return dataclasses.replace(automatic_programs(settings), gradients=gradients)


def automatic_programs(settings: GradientSettings) -> GradientPrograms:
    """Returns programs with gradients that the compiler reduces."""
    model, plan = settings.model, settings.plan
    automatic = AutomaticGradients(model, plan, settings.num_microbatches)

    def gradients(state: TrainState, *inputs: Any) -> tuple[Params, Loss]:
        params = stored_params(model, plan, state)
        return automatic.gradients(params, state.model_state, *inputs)

    def evaluate(state: TrainState, batch: Batch) -> Loss:
        params = stored_params(model, plan, state)
        return automatic.loss(params, state.model_state, StepBatch(batch), None)

    def loss(master: Params, *inputs: Any) -> Loss:
        return automatic.loss(compute_params_by_layer(model, plan, master), *inputs)

    return GradientPrograms(gradients, evaluate, loss)


STRATEGIES = (
    (lambda x: x.plan.mesh.shape[PIPELINE] > 1, pipelined_programs),
    (is_local, local_programs),
    (lambda settings: True, automatic_programs),
)
"""Condition and constructor of each strategy; the first that applies is used."""


def pipelined_model(settings: GradientSettings) -> PipelinedModel:
    """Returns the model of a run with pipeline schedule and residual policy."""
    model, pipeline = settings.model, settings.pipeline
    num_stages = settings.plan.mesh.shape[PIPELINE]
    schedule = make_pipeline_schedule(pipeline, num_stages, settings.num_microbatches)
    keeps = model.keeps if settings.recomputes else None
    drops = settings.drops_tokens
    return PipelinedModel(model, schedule, pipeline.recomputes, keeps, drops)


def make_pipeline_schedule(
    pipeline: Pipeline, num_stages: int, num_microbatches: int
) -> schedules.Schedule:
    """Returns the schedule that the settings of a pipeline name."""
    return schedules.make_schedule(
        cast(schedules.Name, pipeline.kind),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=pipeline.chunks_per_stage,
    )


def stored_params(model: Model, plan: Plan, state: TrainState) -> Params:
    """Returns compute parameters in logical shapes, stored or cast from masters."""
    if state.params != ():
        return unpad_tree(stored_compute(state, plan), plan.compute)
    return compute_params_by_layer(model, plan, unpad_tree(state.master, plan.master))


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Pure functions of arrays; `jit` with shardings of `state_rows`.

    The plain case runs `train`, one program. A run with an update elsewhere or at
    another time composes `gradients` and `update`.
    """

    gradient_programs: GradientPrograms
    apply_gradients: Callable[..., tuple[TrainState, Metrics]]
    plan: Plan
    seed: int

    def step_key(self, state: TrainState) -> jax.Array:
        """Returns the random key of a step, from seed and step: equal on all meshes."""
        return jax.random.fold_in(jax.random.key(self.seed), state.step)

    def gradients(
        self,
        state: TrainState,
        batch: Batch | StepBatch,
        key: jax.Array | None = None,
    ) -> tuple[Params, Loss]:
        """Differentiates the mean loss of the global batch.

        Gradients are in logical shapes, times the loss scale. `key` defaults to the key
        of the step.
        """
        key = self.step_key(state) if key is None else key
        step, scale = StepBatch.of(batch), loss_scale_of(state)
        return self.gradient_programs.gradients(state, step, key, scale)

    def loss_of(
        self,
        state: TrainState,
        batch: Batch | StepBatch,
        key: jax.Array | None = None,
    ) -> Callable[[Params], Loss]:
        """Returns the loss of a step as a function of logical master weights."""
        key = self.step_key(state) if key is None else key
        loss, step = self.gradient_programs.loss, StepBatch.of(batch)
        return lambda master: loss(master, state.model_state, step, key)

    def update(
        self,
        state: TrainState,
        grads: Params,
        loss: Loss,
        batch: Batch | StepBatch,
        key: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Applies the results of `gradients`; `batch` and `key` serve line searches."""
        loss_of = self.loss_of(state, batch, key)
        return self.apply_gradients(state, grads, loss, lambda x: loss_of(x).value)

    def train(
        self, state: TrainState, batch: Batch | StepBatch
    ) -> tuple[TrainState, Metrics]:
        """Takes one step: `gradients` and `update` in one program."""
        return self.update(state, *self.gradients(state, batch), batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Evaluates the loss, with averaged parameters if the state has an average."""
        average, programs = averaged(state, self.plan), self.gradient_programs
        if average is None:
            loss = programs.evaluate(state, batch)
        else:
            loss = programs.loss(average, state.model_state, StepBatch(batch), None)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}
