"""Executor whose step is one program, and the parameters of a state for the model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from zjax.generation.by_unit import UnitDecoder, UnitPrograms
from zjax.generation.sizes import has_room
from zjax.jaxprs.versions import dtype_promotion
from zjax.offload.compiled import Jit, Peak
from zjax.offload.units import UnitStream
from zjax.replicas.state import run_rows
from zjax.run.compiler import Options, step_options
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.describe import format_bytes
from zjax.sharding.layers import layer_by_layer, take_apart
from zjax.sharding.memory import tree_bytes
from zjax.sharding.mesh import BATCH_AXES, is_simulated, num_shares
from zjax.sharding.placement import (
    ArrayPlan,
    abstract_tree,
    shardings,
    unpad_tree,
    use_tree,
)
from zjax.sharding.plan import Plan, staged_plan
from zjax.storage.move import to_devices
from zjax.train.average import averaged, check_average, only_weights, parts_of
from zjax.train.compute_params import compute_params
from zjax.train.programs import GradientSettings, Programs, make_gradients
from zjax.train.state import TrainState, check_not_consumed, stored_compute
from zjax.train.update import Schedule, Sent, make_update
from zjax.typing import Batch, Metrics, Model, Params, StepBatch


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
    precision = config.precision
    settings = GradientSettings(
        model,
        plan,
        resolve_batch(config, shares).num_microbatches,
        reduces_in_float32=precision.reduce_dtype == "float32",
        zero=config.zero,
        pipeline=config.pipeline,
        recomputes=config.model.remat != "none",
        drops_tokens=config.random_ltd is not None,
    )
    update = make_update(
        tx, plan, config.optimizer, precision, schedule, model.stack, sent
    )
    return Programs(make_gradients(settings), update, plan, config.seed)


class Weights:
    """Turns states into parameters, by programs that compile once."""

    def __init__(self, model: Model, plan: Plan):
        self._model, self._plan = model, plan
        on_device = staged_plan(plan)
        places = jax.tree.map(self._place, on_device.compute)

        def compute(state: TrainState) -> Params:
            weights = averaged(state, on_device)
            if weights is None:
                weights = unpad_tree(state.master, on_device.master)
            return compute_params(weights, on_device)

        def unpad(params: Params) -> Params:
            return unpad_tree(params, on_device.compute)

        def gather(params: Params) -> Params:
            return use_tree(params, on_device.compute)

        self._compute = jax.jit(compute, out_shardings=places)
        self._unpad = jax.jit(unpad, out_shardings=places)
        self._gather = jax.jit(gather)

    def __call__(self, state: TrainState) -> Params:
        """Averaged weights if the state has an average, else the current weights.

        Arrays in the compute dtype and logical shapes, placed as in a step. The state
        is not consumed; offloaded averages are refused.
        """
        check_not_consumed(state)
        check_average(state, self._plan)
        with dtype_promotion():
            # The stored compute copy of raw weights needs no cast.
            if parts_of(state)[0] != "raw" or state.params == ():
                return self._compute(only_weights(state, self._plan))
            return self._unpad(
                jax.tree.map(
                    # The state stays in use: its arrays must not be donated.
                    lambda x, row: to_devices(x, row, is_consumed=False),
                    stored_compute(state, self._plan),
                    self._plan.compute,
                )
            )

    def bind(self, state: TrainState) -> Any:
        """Returns the module with the weights of a state, in evaluation mode."""
        return self._model.bind(self(state), state.model_state)

    def gathered(self, state: TrainState) -> Params:
        """Returns parameters gathered over the ZeRO axes, to write text.

        Gathered once: each token would gather the weights again.
        """
        params = self(state)
        return self._gather(params) if self._plan.splits.compute else params

    def decoder(self, state: TrainState) -> Any:
        """Returns the module with weights gathered over the ZeRO axes."""
        return self._model.bind(self.gathered(state), state.model_state)

    def _place(self, row: ArrayPlan) -> jax.sharding.NamedSharding:
        """Sharding of an unpadded parameter; replicated if the storage is padded."""
        # The logical shape of a padded array does not divide over the mesh.
        return row.stored if row.shape == row.stored_shape else self._plan.replicated


class FusedExecutor:
    """Executor whose step is one program, with all state on the devices."""

    def __init__(
        self, model: Model, plan: Plan, config: Config, programs: Mapping[str, Any]
    ):
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._model, self._plan, self._config = model, plan, config
        self.programs: Mapping[str, Any] = programs
        self.state_plan = run_rows(plan, config)
        self.parameters = Weights(model, plan)

    def state_of(self, program: str) -> TrainState:
        """ArrayPlans of the state that a program reads."""
        return self.state_plan

    def inputs_of(self, program: str, batch: Batch) -> tuple[Any, ...]:
        """Shapes of a program's arguments."""
        return abstract_tree(self.state_of(program)), batch

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        return self.programs["train"](state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        return self.programs["evaluate"](state, batch)

    def decoder(self, state: TrainState) -> Any:
        """Returns the decoder that `zjax.generate` takes.

        Weights that ZeRO splits are gathered once, if devices have room for all.
        """
        rows = staged_plan(self._plan).compute
        whole = sum(row.used_bytes for row in jax.tree.leaves(rows))
        if not self._plan.splits.compute or has_room(whole):
            return self.parameters.decoder(state)
        size = format_bytes(whole)
        logging.warning("text: %s of weights are gathered layer by layer", size)
        layers = jax.tree.map(layer_by_layer, rows)
        params = take_apart(self.parameters(state), layers)
        return UnitDecoder(self._units, params, self._config.model)

    @functools.cached_property
    def _units(self) -> UnitPrograms:
        """Programs of the blocks, each of which gathers the weights of a block."""
        assert self._model.stack is not None
        rows = jax.tree.map(layer_by_layer, staged_plan(self._plan).compute)
        units = UnitStream(
            self._model.stack, dataclasses.replace(self._plan, compute=rows)
        )
        options = step_options(self._config, self._plan)
        return UnitPrograms(units, make_jit(self._plan.mesh, options))

    def settle(self, state: TrainState) -> TrainState:
        """Returns the state itself: a fused step leaves no pending gradient."""
        return state

    def compile(self, program: str, batch: Batch) -> jax.stages.Compiled:
        """Compiles a program for ShapeDtypeStructs of a batch, once per shape."""
        leaves, tree = jax.tree.flatten(batch)
        key = program, tree, tuple(leaves)
        if key not in self._compiled:
            inputs = self.inputs_of(program, batch)
            self._compiled[key] = self.programs[program].lower(*inputs).compile()
        return self._compiled[key]

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles `train` and reads the memory analysis; None without an analysis."""
        analysis = self.compile("train", batch).memory_analysis()
        if analysis is None:
            return None
        read = tree_bytes(self.state_of("train"))
        parts = {
            "state": tree_bytes(self.state_plan),
            "batch": analysis.argument_size_in_bytes - read,
            # Donated arguments are aliased to outputs, and counted as state.
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "parameters in use, gradients, activations": analysis.temp_size_in_bytes,
        }
        return Peak("train", parts)


def fused_executor(
    model: Model, tx: Any, plan: Plan, config: Config, schedule: Schedule | None
) -> FusedExecutor:
    """Builds the executor of a run whose gradients the compiler reduces.

    The programs are `train` and `evaluate`, and the halves of `train`, `gradients` and
    `update`, for callers that act in between.
    """
    pure = make_programs(model, tx, plan, config, schedule)
    jit = functools.partial(jax.jit, compiler_options=step_options(config, plan))
    replaces_state = {
        "donate_argnums": 0,
        "out_shardings": (shardings(run_rows(plan, config)), None),
    }
    programs = {
        "train": jit(pure.train, **replaces_state),
        "gradients": jit(pure.gradients),
        "update": jit(pure.update, **replaces_state),
        "evaluate": jit(pure.evaluate),
    }
    return FusedExecutor(model, plan, config, programs)


class StepNumber:
    """Tracks the step number on the host, to wait for the device only when unknown."""

    def __init__(self):
        self._step, self._number = None, 0

    def knows(self, state: TrainState) -> bool:
        """Whether a state is the result of the previous step, not from elsewhere."""
        # Identity of the array: comparing values would wait for the device.
        return state.step is self._step

    def before(self, state: TrainState) -> int:
        """Number of steps a state has taken; waits for the device if unknown."""
        if not self.knows(state):
            self._step, self._number = state.step, int(state.step)
        return self._number

    def after(self, state: TrainState, number: int) -> None:
        """Stores the number of steps that a new state has taken."""
        self._step, self._number = state.step, number


def make_jit(mesh: Mesh | AbstractMesh, options: Options) -> Jit:
    """Returns `jax.jit` with the compiler options of a run.

    On simulated devices the host waits for each program before it calls the next:
    collectives of two programs would share threads and could deadlock.
    """
    jit = functools.partial(jax.jit, compiler_options=options)
    if not is_simulated(mesh):
        return jit

    def jit_alone(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        program = jit(function, **settings)

        @functools.wraps(program)
        def run_alone(*args: Any) -> Any:
            return jax.block_until_ready(program(*args))

        # Steps are also compiled without being run.
        run_alone.lower = program.lower  # type: ignore[attr-defined]
        return run_alone

    return jit_alone


@runtime_checkable
class Executor(Protocol):
    """Runs the programs of a run on placed batches and states not yet consumed.

    Args:
        state_plan: TrainState of ArrayPlan: where each array of the state is stored.
        parameters: Function from a state to the parameters as the model takes them.
    """

    state_plan: TrainState
    parameters: Weights
    programs: Mapping[str, Callable[..., Any]]

    def train(
        self, state: TrainState, batch: Batch | StepBatch
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        ...

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        ...

    def decoder(self, state: TrainState) -> Any:
        """Returns the decoder that `zjax.generate` takes."""
        ...

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient and donates the state."""
        ...

    def compile(self, program: str, batch: Batch | StepBatch) -> jax.stages.Compiled:
        """Compiles one of `programs` for ShapeDtypeStructs of a batch."""
        ...

    def predict_peak(self, batch: Batch | StepBatch) -> Peak | None:
        """Compiles a step for ShapeDtypeStructs of a batch and adds up device memory.

        Returns None where the compiler does not report memory.
        """
        ...
