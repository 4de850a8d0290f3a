"""The programs of a run: pure functions with the shardings of all arrays."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.parallel import pipeline_schedule as schedules
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.mesh import BATCH_AXES, PIPELINE, num_shares
from zjax.sharding.placement import pad_tree, shardings, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.average import averaged
from zjax.train.compute_params import compute_dtype, compute_params_by_layer
from zjax.train.exchange import Sent
from zjax.train.gradients import AutomaticGradients, local_gradients
from zjax.train.pipelined import PipelinedModel, pipelined_gradients
from zjax.train.state import TrainState, state_rows, stored_compute
from zjax.train.update import Schedule, loss_scale_of, make_update
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True)
class GradientPrograms:
    """The loss of a run and the gradients, as pure functions.

    Args:
        gradients: `gradients(state, batch, key, scale) -> (grads, loss)`; gradients of
            `scale` times the mean loss, in logical shapes, and the unscaled loss.
        evaluate: `evaluate(state, batch) -> Loss`, without gradients or a key.
        loss: `loss(master, model_state, batch, key) -> Loss`, of any parameters in
            logical shapes.
    """

    gradients: Callable[..., tuple[Params, Loss]]
    evaluate: Callable[[TrainState, Batch], Loss]
    loss: Callable[..., Loss]


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """The inputs of every strategy.

    Args:
        model: Model with the loss to differentiate.
        plan: Placement of every array.
        config: Config; reads `precision.reduce_dtype`, `pipeline`, `random_ltd` and,
            for built-in models, `model.remat`.
        num_microbatches: Number of gradient accumulation steps, 1 or more.
    """

    model: Model
    plan: Plan
    config: Config
    num_microbatches: int

    @property
    def reduces_in_float32(self) -> bool:
        """Whether gradients are reduced in float32."""
        return self.config.precision.reduce_dtype == "float32"

    @property
    def reduce_dtype(self) -> Any:
        """Dtype in which `shard_map` reduces gradients."""
        return jnp.float32 if self.reduces_in_float32 else compute_dtype(self.plan)


def make_gradients(
    model: Model, plan: Plan, config: Config, num_microbatches: int
) -> GradientPrograms:
    """Returns the functions of the first strategy in `STRATEGIES` that applies."""
    settings = GradientSettings(model, plan, config, num_microbatches)
    return next(make(settings) for applies, make in STRATEGIES if applies(settings))


def is_pipelined(settings: GradientSettings) -> bool:
    """Whether the mesh has two stages or more."""
    return settings.plan.mesh.shape[PIPELINE] > 1


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
    name = next(name for name in names if getattr(settings.config.zero, name))
    if settings.model.loops_over_layers:
        problem = "gathers the layers one by one, and the model loops over them"
        remedy = "use False, or model.layers_per_scan=0"
    else:
        problem = "needs a loss that is a mean over rows"
        remedy = "use False, or a zjax.Model with separable=True"
    return Problem(f"zero.{name}", True, problem, remedy)


def pipelined_programs(settings: GradientSettings) -> GradientPrograms:
    """Returns the programs of `zjax.train.pipelined`."""
    plan = settings.plan
    pipelined = pipelined_gradients(
        pipelined_model(settings), plan, reduce_dtype=settings.reduce_dtype
    )

    def gradients(state: TrainState, *inputs: Any) -> tuple[Params, Loss]:
        return pipelined.gradients(state.master, state.model_state, *inputs)

    def evaluate(state: TrainState, batch: Batch) -> Loss:
        return pipelined.loss(state.master, state.model_state, batch, None)

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
        return automatic.loss(params, state.model_state, batch, None)

    def loss(master: Params, *inputs: Any) -> Loss:
        return automatic.loss(compute_params_by_layer(model, plan, master), *inputs)

    return GradientPrograms(gradients, evaluate, loss)


STRATEGIES = (
    (is_pipelined, pipelined_programs),
    (is_local, local_programs),
    (lambda settings: True, automatic_programs),
)
"""Condition and constructor of each strategy; the first that applies is used."""


def pipelined_model(settings: GradientSettings) -> PipelinedModel:
    """Returns the model of a run with pipeline schedule and residual policy."""
    config, model = settings.config, settings.model
    schedule = make_pipeline_schedule(config, settings.plan, settings.num_microbatches)
    keeps = None if config.model.remat == "none" else model.keeps
    recomputes, drops = config.pipeline.recompute, config.random_ltd.form != "none"
    return PipelinedModel(model, schedule, recomputes, keeps, drops)


def make_pipeline_schedule(
    config: Config, plan: Plan, num_microbatches: int
) -> schedules.Schedule:
    """Returns the schedule of `config.pipeline` for the stages of a plan's mesh."""
    pipeline = config.pipeline
    return schedules.make_schedule(
        pipeline.schedule,
        num_stages=plan.mesh.shape[PIPELINE],
        num_microbatches=num_microbatches,
        num_chunks=pipeline.num_chunks if pipeline.schedule == "interleaved" else 1,
    )


def stored_params(model: Model, plan: Plan, state: TrainState) -> Params:
    """Returns compute parameters in logical shapes, stored or cast from masters."""
    if state.params != ():
        return unpad_tree(stored_compute(state, plan), plan.compute)
    return compute_params_by_layer(model, plan, unpad_tree(state.master, plan.master))


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Pure functions of arrays; `jit` with `state_shardings`.

    The plain case runs `train`, one program. A run with an update elsewhere or at
    another time composes `gradients` and `update`.

    Args:
        gradient_programs: Functions of the loss and the gradients.
        apply_gradients: Function that `zjax.train.update.make_update` builds.
        plan: Placement of every array.
        config: Config; reads `seed`.
    """

    gradient_programs: GradientPrograms
    apply_gradients: Callable[..., tuple[TrainState, Metrics]]
    plan: Plan
    config: Config

    @property
    def state_shardings(self) -> TrainState:
        """A TrainState of NamedSharding."""
        return shardings(state_rows(self.plan, self.config))

    def step_key(self, state: TrainState) -> jax.Array:
        """Returns the random key of a step, from seed and step: equal on all meshes."""
        return jax.random.fold_in(jax.random.key(self.config.seed), state.step)

    def gradients(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> tuple[Params, Loss]:
        """Differentiates the mean loss of the global batch.

        Gradients are in logical shapes, times the loss scale. `key` defaults to the key
        of the step.
        """
        key = self.step_key(state) if key is None else key
        scale = loss_scale_of(state)
        return self.gradient_programs.gradients(state, batch, key, scale)

    def loss_of(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> Callable[[Params], Loss]:
        """Returns the loss of a step as a function of logical master weights."""
        key = self.step_key(state) if key is None else key
        loss, model_state = self.gradient_programs.loss, state.model_state
        return lambda master: loss(master, model_state, batch, key)

    def update(
        self,
        state: TrainState,
        grads: Params,
        loss: Loss,
        batch: Batch,
        key: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Applies the results of `gradients`; `batch` and `key` serve line searches."""
        loss_of = self.loss_of(state, batch, key)
        return self.apply_gradients(state, grads, loss, lambda x: loss_of(x).value)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one step: `gradients` and `update` in one program."""
        return self.update(state, *self.gradients(state, batch), batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Evaluates the loss, with averaged parameters if the state has an average."""
        average, programs = averaged(state, self.plan), self.gradient_programs
        if average is None:
            loss = programs.evaluate(state, batch)
        else:
            loss = programs.loss(average, state.model_state, batch, None)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}


def make_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None = None,
    sent: Sent | None = None,
) -> Programs:
    """Builds the uncompiled programs of a run.

    `schedule` is the learning rate by applied step, for the metrics; `sent` is the
    message between replicas, None if the compiler reduces gradients.
    """
    shares = num_shares(plan.mesh, BATCH_AXES)
    num_microbatches = resolve_batch(config, shares).num_microbatches
    gradient_programs = make_gradients(model, plan, config, num_microbatches)
    update = make_update(tx, plan, config, schedule, model.stack, sent)
    return Programs(gradient_programs, update, plan, config)
