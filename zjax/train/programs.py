"""The programs of a run: pure functions with the shardings of their arrays."""

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
    """The loss of a run and its gradients, as pure functions.

    Args:
        gradients: `gradients(state, batch, key, scale) -> (grads, loss)`: of `scale`
            times the mean loss, in logical shapes; the loss itself is not scaled.
        evaluate: `evaluate(state, batch) -> Loss`, without gradients or a key.
        loss: `loss(master, model_state, batch, key) -> Loss`, of other parameters in
            their logical shapes.
    """

    gradients: Callable[..., tuple[Params, Loss]]
    evaluate: Callable[[TrainState, Batch], Loss]
    loss: Callable[..., Loss]


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """The inputs of every strategy.

    Args:
        model: Its loss.
        plan: Places every array.
        config: Read for `precision.reduce_dtype`, `pipeline`, `random_ltd` and, of the
            built-in models, `model.remat`.
        num_microbatches: Gradient accumulation, 1 or more.
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
    """Chooses how a run differentiates its loss."""
    settings = GradientSettings(model, plan, config, num_microbatches)
    return next(make(settings) for applies, make in STRATEGIES if applies(settings))


def is_pipelined(settings: GradientSettings) -> bool:
    """Whether the mesh has two stages or more."""
    return settings.plan.mesh.shape[PIPELINE] > 1


def is_local(settings: GradientSettings) -> bool:
    """Whether devices differentiate their local rows, and reduce by `shard_map`.

    They do if `precision.reduce_dtype` asks for it, or if the communication is then
    exactly that of the ZeRO paper.
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
    """Why the collectives of ZeRO++ cannot be those of a run."""
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
    """Programs of `zjax.train.pipelined`."""
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
    """Gradients of `zjax.train.gradients`, evaluation of `automatic`."""
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
    """Programs of `zjax.train.gradients`."""
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
    """The model of a run with its schedule and its residuals."""
    config, model = settings.config, settings.model
    schedule = make_pipeline_schedule(config, settings.plan, settings.num_microbatches)
    keeps = None if config.model.remat == "none" else model.keeps
    recomputes, drops = config.pipeline.recompute, config.random_ltd.form != "none"
    return PipelinedModel(model, schedule, recomputes, keeps, drops)


def make_pipeline_schedule(
    config: Config, plan: Plan, num_microbatches: int
) -> schedules.Schedule:
    """The schedule that `config.pipeline` asks for, on the stages of a plan's mesh."""
    pipeline = config.pipeline
    return schedules.make_schedule(
        pipeline.schedule,
        num_stages=plan.mesh.shape[PIPELINE],
        num_microbatches=num_microbatches,
        num_chunks=pipeline.num_chunks if pipeline.schedule == "interleaved" else 1,
    )


def stored_params(model: Model, plan: Plan, state: TrainState) -> Params:
    """Compute parameters in logical shapes, stored or made from master weights."""
    if state.params != ():
        return unpad_tree(stored_compute(state, plan), plan.compute)
    return compute_params_by_layer(model, plan, unpad_tree(state.master, plan.master))


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Pure functions of arrays; `jit` them with `state_shardings`.

    Args:
        gradient_programs: The loss and its gradients.
        apply_gradients: What `zjax.train.update.make_update` builds.
        plan: Places every array.
        config: Read for `seed`.
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
        """The random key of a step, which hangs on the seed and the step alone."""
        return jax.random.fold_in(jax.random.key(self.config.seed), state.step)

    def gradients(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> tuple[Params, Loss]:
        """Differentiates the mean loss."""
        key = self.step_key(state) if key is None else key
        scale = loss_scale_of(state)
        return self.gradient_programs.gradients(state, batch, key, scale)

    def loss_of(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> Callable[[Params], Loss]:
        """The loss of a step as a function of the master weights."""
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
        """Applies gradients."""
        loss_of = self.loss_of(state, batch, key)
        return self.apply_gradients(state, grads, loss, lambda x: loss_of(x).value)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step: `gradients` and `update` in one program."""
        return self.update(state, *self.gradients(state, batch), batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """The loss of the averaged parameters where they are kept, else of these."""
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
    """Builds the programs of a run."""
    shares = num_shares(plan.mesh, BATCH_AXES)
    num_microbatches = resolve_batch(config, shares).num_microbatches
    gradient_programs = make_gradients(model, plan, config, num_microbatches)
    update = make_update(tx, plan, config, schedule, model.stack, sent)
    return Programs(gradient_programs, update, plan, config)
