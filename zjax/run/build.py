"""Makes a run: plan, first state and step of a model and an optimizer."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zjax.data.placement import BatchPlacement
from zjax.errors import ConfigError, Problem
from zjax.generation.generate import generate
from zjax.generation.loading import continues_text
from zjax.jaxprs.versions import dtype_promotion
from zjax.optim.build import make_optimizer
from zjax.optim.groups import named_params
from zjax.optim.per_layer import per_layer_if_needed
from zjax.processes.agreement import check_agreement
from zjax.processes.barrier import connect
from zjax.processes.host import warn_of_small_pages
from zjax.replicas.state import saved_rows
from zjax.run.batch import abstract_batch
from zjax.run.first_state import first_state
from zjax.run.fit import bytes_beside, check_fits, fit_plan, offloaded_inputs
from zjax.run.resume import fingerprint_functions
from zjax.run.step import Step, make_step
from zjax.run.token_scores import TokenScores
from zjax.run.without_effect import (
    check_loss_acts,
    check_model_acts,
)
from zjax.schedule.learning_rate import make_schedule
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.storage.transfers import progress_bar
from zjax.train.compute_params import compute_dtype
from zjax.train.state import (
    TrainState,
    with_params,
)
from zjax.train.update import Schedule
from zjax.typing import Batch, Device, Metrics, Model
from zjax.weights.source import name_leaves


@dataclasses.dataclass(frozen=True)
class Run:
    """Planned run with the first state; frozen, as `step` returns the next state.

    Args:
        config: Checked settings.
        model: Model as pure functions.
        mesh: Mesh of the devices.
        plan: Plan of every array; `print` shows it.
        state: First state; the first step consumes it.
        step: Function `step(state, batch) -> (state, metrics)`.
        tx: Optax transformation of the user; None if the settings define the optimizer.
    """

    config: Config
    model: Model
    mesh: Mesh
    plan: plans.Plan
    state: TrainState
    step: Step
    tx: Any = None

    @functools.cached_property
    def functions(self) -> dict[str, str]:
        """Fingerprints of the user's functions, which no setting describes."""
        with dtype_promotion():
            return fingerprint_functions(
                self.config,
                self.model,
                self.tx,
                compute_dtype=compute_dtype(self.plan),
            )

    @functools.cached_property
    def token_scores(self) -> TokenScores:
        """Scores of the tokens of batches, by programs that compile once."""
        return TokenScores(self.model, self.plan, self.config)

    @property
    def batch_placement(self) -> BatchPlacement:
        """Shardings and checks of batches, for loaders."""
        return BatchPlacement(self.plan.batch_sharding, self.model.entries)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change.

        Args:
            state: Any state of this run; not consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            float32 scalars still on the device.
        """
        return self.step.evaluate(state, batch)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts with the built-in decoder.

        Offloaded parameters are streamed block by block.

        Args:
            state: Any state of this run; not consumed.
            tokens: Prompts, int32[B, L].
            settings: Further arguments of `zjax.generate`.

        Returns:
            Prompts and continuations, int32[B, L + max_new_tokens].

        Raises:
            ConfigError: A setting out of range, no room for the tokens, or a model that
                is not the built-in decoder.
            DataError: The prompts are no integers, or an id is not in the vocabulary.
        """
        decoder = self.decoder(state)
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        with jax.set_mesh(self.mesh):
            return generate(decoder, tokens, **settings)

    def decoder(self, state: TrainState) -> Any:
        """Returns the built-in decoder with the weights of a state, to write text.

        Args:
            state: Any state of this run; not consumed.

        Returns:
            What `zjax.generate` takes, under `jax.set_mesh(run.mesh)`.

        Raises:
            ConfigError: The model is not the built-in decoder.
        """
        if not continues_text(self.model):
            problem = "keeps no keys to continue text from"
            remedy = "use zjax.Generator(run, state, max_length=...), which reads the "
            remedy += "whole text for each token, or the built-in decoder"
            raise ConfigError(Problem("model", "given", problem, remedy))
        return self.step.decoder(state)

    def bind(self, state: TrainState) -> Any:
        """Binds the weights of a state to the module, in evaluation mode.

        Args:
            state: Any state of this run; not consumed.

        Returns:
            The module that `loss_fn` calls: an NNX module, or a view of a Linen module
            with `params`, `variables` and `sown`.

        Raises:
            StateError: The state was consumed before.
            PlanError: The averaged weights of the optimizer are offloaded.
        """
        return self.step.executor.parameters.bind(state)


@dtype_promotion()
def start_run(
    config: Config,
    model: Model,
    tx: Any,
    *,
    schedule: Schedule | None = None,
    **options: Any,
) -> Run:
    """Makes a run with the user's `tx` and `schedule`, or by the settings if None.

    `options` are further arguments of `make_run`.
    """
    if tx is None:
        made = make_optimizer(config, model)
        # The bytes that the optimizer of a user would take for a critic are not known.
        options |= {"beside": bytes_beside(config, options.get("devices"))}
        return make_run(config, model, made, schedule=make_schedule(config), **options)
    adopted = adopt_optimizer(tx, model, config)
    run = make_run(config, model, adopted, schedule=schedule, **options)
    return dataclasses.replace(run, tx=tx)


def unread_schedule(tx: Any, schedule: Schedule | None) -> list[Problem]:
    """Lists the problem of a caller's schedule beside the optimizer of the settings."""
    if tx is not None or schedule is None:
        return []
    problem = "is the learning rate of tx, which is not given"
    remedy = "give tx, or leave it out and set optimizer.schedule"
    return [Problem("schedule", "given", problem, remedy)]


def adopt_optimizer(tx: Any, model: Model, config: Config) -> Any:
    """Makes a user's optimizer treat each layer of a stacked array as a separate array.

    Args:
        tx: Optax gradient transformation, written for one array per layer.
        model: Model as pure functions; the logical dim `layers` marks stacked arrays.
        config: Checked settings; offloaded state is stored layer by layer anyway, and
            `mesh` may rename dims.

    Returns:
        `tx`, wrapped where stacking would change its updates.

    Raises:
        PlanError: The transformation cannot update from one mean gradient.
    """
    if plans.stores_layers_apart(config.zero, model):
        return tx
    return per_layer_if_needed(tx, *named_params(model, config.mesh))


@dtype_promotion()
def make_run(
    config: Config,
    model: Model,
    tx: Any,
    *,
    schedule: Schedule | None = None,
    devices: Sequence[Device] | None = None,
    restore: Callable[[TrainState], TrainState] | None = None,
    batch: Batch | None = None,
    beside: memory.MemoryBytes = memory.NOTHING,
) -> Run:
    """Plans a run, creates the first state and builds the step.

    Args:
        config: Checked settings.
        model: Model as pure functions.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        schedule: Learning rate by applied step, for the metrics.
        devices: Devices to use; all by default.
        restore: Function from the plans of the state's arrays to the first state, for
            example read from a checkpoint; by default the state is initialised.
        batch: Arrays or ShapeDtypeStructs of the global batch, to predict the memory of
            a step; None for the batch of the built-in models.
        beside: Bytes per device that models beside a policy hold.

    Returns:
        The run.

    Raises:
        ProcessError: Processes of the run differ in their settings or software.
        PlanError: Arrays or an optimizer that cannot be placed, or that do not fit.
        ConfigError: `checkpoint.init_from` holds a dense model of another shape, or the
            model has no adapters of `lora`, or rounds nothing of `quantize`.
        ModelError: Pipelines or offload would train the stack of the model in place of
            the model's loss.
        CheckpointError: `checkpoint.init_from` does not hold this model, or two arrays
            would get the same name in a checkpoint.
    """
    check_model_acts(config, model)
    mesh = meshes.make_mesh(config.mesh, devices)
    check_loss_acts(config, model, mesh.shape[meshes.PIPELINE])
    # On a mesh of some processes a collective of all processes would hang.
    if jax.process_count() == len({x.process_index for x in mesh.devices.flat}):
        check_agreement(config)
        connect(mesh)
    plan = fit_plan(config, mesh, model, tx, batch, beside)
    name_leaves(saved_rows(plan, config))  # before training, not at a save
    shapes = abstract_batch(config, plan) if batch is None else batch
    inputs = offloaded_inputs(model, plan, config, shapes)
    check_fits(plan, config, mesh, inputs, beside)
    step = make_step(model, tx, plan, config, schedule=schedule)
    num_local, platform = len(mesh.local_devices), meshes.platform_of(mesh)
    warn_of_small_pages(num_local * memory.stored_bytes(plan).host, platform)
    offloaded_bytes = num_local * memory.stored_bytes(plan).offloaded
    with progress_bar(
        "placing the state", offloaded_bytes if jax.process_index() == 0 else 0
    ):
        if restore:
            state = with_params(restore(saved_rows(plan, config)), plan)
        else:
            state = first_state(model, tx, plan, config)
    return Run(config, model, mesh, plan, state, step)
