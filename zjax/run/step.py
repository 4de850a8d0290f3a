"""One optimizer step as a host function over compiled programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zjax.data.entries import check_batch, check_placed_values
from zjax.data.taught import is_stored
from zjax.errors import ConfigError, PlanError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.offload.compiled import Peak
from zjax.run.batch import StepInputs, check_model
from zjax.run.fused import Executor, StepNumber, fused_executor
from zjax.run.replicas import ReplicasExecutor
from zjax.run.stored_teacher import StoredTeacher
from zjax.run.streamed import StreamedExecutor
from zjax.run.teacher import Teacher
from zjax.schedule.exchange import Exchanges
from zjax.schedule.training import TrainingSchedule
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding import plan as plans
from zjax.sharding.activations import batch_shardings
from zjax.sharding.mesh import is_simulated
from zjax.train import microbatches
from zjax.train.average import check_average
from zjax.train.state import TrainState, check_not_consumed
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model, Params, StepBatch


@dataclasses.dataclass(frozen=True)
class Step:
    """Callable `step(state, batch) -> (state, metrics)` that places a batch and trains.

    The argument `state` is donated; use the returned state.

    Args:
        mesh: Mesh of the devices.
        plan: Plan of the run; read for the sharding of batches.
        model: Model as pure functions; read for the requirements on batches.
        num_microbatches: Number of gradient accumulation steps, 1 or more.
        executor: Executor that runs the compiled programs.
        inputs: Adds to each batch what the schedule says of the step.
        checks_ids: Whether token ids are checked in batches on the devices, too.
    """

    mesh: Mesh
    plan: plans.Plan
    model: Model
    num_microbatches: int
    executor: Executor
    inputs: StepInputs
    checks_ids: bool = False
    _number: StepNumber = dataclasses.field(default_factory=StepNumber)

    @property
    def programs(self) -> Mapping[str, Any]:
        """Jitted functions by name; see the executor."""
        return self.executor.programs

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step.

        Args:
            state: State of the run; consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            The next state; float32 scalars and totals, still on the device.

        Raises:
            PlanError: The batch does not divide over the devices.
            StateError: The state was consumed before.
        """
        return self._run(self._train, state, self.place_batch(batch))

    def _train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Trains on a placed batch, extended by the inputs of the step."""
        # Numbers of states from elsewhere wait for the device: ask only if needed.
        if self.inputs.adds_nothing:
            return self.executor.train(state, StepBatch(batch))
        number = self._number.before(state) + 1
        step_batch = self.inputs.extend(batch, number)
        state, metrics = self.executor.train(state, step_batch)
        self._number.after(state, number)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change.

        Args:
            state: State of the run; not consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            float32 scalars still on the device.

        Raises:
            PlanError: The batch does not divide over the devices, or the averaged
                weights of the optimizer are offloaded.
            StateError: The state was consumed before.
        """
        check_average(state, self.plan)
        return self._run(self.executor.evaluate, state, self.place_batch(batch))

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient that a delayed update left for the next step.

        Args:
            state: State of the run; consumed.

        Returns:
            The state without a pending gradient, as a checkpoint stores it.

        Raises:
            StateError: The state was consumed before.
        """
        return self._run(self.executor.settle, state)

    def decoder(self, state: TrainState) -> Any:
        """Returns the built-in decoder with the weights of a state, to write text.

        Args:
            state: State of the run; not consumed.

        Returns:
            What `zjax.generate` takes, under the mesh of the run: a `Decoder` with
            weights gathered over the ZeRO axes, or blocks that stay off the devices.

        Raises:
            StateError: The state was consumed before.
        """
        check_not_consumed(state)
        return self.executor.decoder(state)

    def parameters(self, state: TrainState) -> Params:
        """Returns the parameters as the model takes them, for use outside of a step.

        Args:
            state: Any state of the run, not consumed; averaged weights are preferred,
                see `zjax.train.average`.

        Returns:
            Arrays in the compute dtype and in logical shapes, placed as in a step.

        Raises:
            StateError: The state was consumed before.
            PlanError: The averaged weights of the optimizer are offloaded.
        """
        return self.executor.parameters(state)

    def gathered(self, state: TrainState) -> Params:
        """Returns the parameters gathered over the ZeRO axes, to write text.

        Args:
            state: Any state of the run, not consumed.

        Returns:
            Arrays as `parameters` returns, on every device of the ZeRO axes.

        Raises:
            StateError: The state was consumed before.
            PlanError: The averaged weights of the optimizer are offloaded.
        """
        return self.executor.parameters.gathered(state)

    def place_batch(self, batch: Batch) -> Batch:
        """Places a batch on the devices; arrays with the right sharding stay.

        Args:
            batch: Arrays of the global batch. With several processes, NumPy arrays hold
                the rows of this process's devices: all rows if pipeline stages or
                sequence shards are spread over the processes.

        Returns:
            Global arrays on the plan's batch sharding.

        Raises:
            DataError: The batch lacks what the loss requires.
            PlanError: The batch does not divide over the devices.
        """
        batch = check_batch(batch, self.model.entries)
        num_shares = self.plan.num_batch_shares
        # Stages or sequence shards may spread one batch share over several processes.
        num_local = max(1, num_shares // jax.process_count())
        microbatches.check_batch(batch, self.model, 1, num_local)
        microbatches.check_lengths(batch, self.model, self.plan.num_length_shares)

        def place(x: Any, sharding: Any) -> jax.Array:
            if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(
                sharding, x.ndim
            ):
                return x
            if jax.process_count() == 1:
                return jax.device_put(x, sharding)
            return jax.make_array_from_process_local_data(sharding, x)

        placed = jax.tree.map(place, batch, self.batch_shardings(batch))
        if self.checks_ids:
            check_placed_values(placed, self.model.entries)
        return placed

    def batch_shardings(self, batch: Batch) -> Any:
        """Shardings of a batch.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.

        Returns:
            Tree of shardings, as `batch`.
        """
        return batch_shardings(self.plan, batch, self.model.entries)

    def compile(
        self, batch: Batch, program: str = "train", number: int | None = None
    ) -> jax.stages.Compiled:
        """Compiles a program without running it, for memory analysis and HLO text.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.
            program: A name in `programs`.
            number: Number of the step, 1 or more; None for step 1 with all tokens.

        Returns:
            The compiled program; ask it for `memory_analysis()`.

        Raises:
            PlanError: The batch does not divide over the devices, or the step is a
                sequence of programs, as where the state is offloaded.
        """
        batch = self._abstract_batch(batch)
        with jax.set_mesh(self.mesh), dtype_promotion():
            if program != "evaluate":
                self.inputs.compile_teacher(batch, number)
                batch = self.inputs.abstract(batch, number)
            return self.executor.compile(program, batch)

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles the step without running it, and predicts peak memory of a device.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.

        Returns:
            Bytes on one device at the peak; None where the compiler reports no memory.

        Raises:
            PlanError: The batch does not divide over the devices.
        """
        batch = self._abstract_batch(batch)
        with jax.set_mesh(self.mesh), dtype_promotion():
            return self.executor.predict_peak(self.inputs.abstract(batch))

    def _abstract_batch(self, batch: Batch) -> Batch:
        """ShapeDtypeStructs of a checked batch, with shardings."""
        number, shares = self.num_microbatches, self.plan.num_batch_shares
        microbatches.check_batch(batch, self.model, number, shares)
        microbatches.check_lengths(batch, self.model, self.plan.num_length_shares)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            batch,
            self.batch_shardings(batch),
        )

    def _run(
        self,
        program: Callable[..., Any],
        state: TrainState,
        *args: Any,
        **settings: Any,
    ) -> Any:
        """Runs a program of the executor under the mesh of the run."""
        check_not_consumed(state)
        # Losses read the number of batch shards from the current mesh.
        with jax.set_mesh(self.mesh), dtype_promotion():
            results = program(state, *args, **settings)
        # Collectives of two programs can deadlock on simulated devices.
        return jax.block_until_ready(results) if is_simulated(self.mesh) else results


def make_step(
    model: Model,
    tx: Any,
    plan: plans.Plan,
    config: Config,
    *,
    schedule: Schedule | None = None,
) -> Step:
    """Builds the step of a run, which compiles at the first call.

    Args:
        model: Model as pure functions.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        plan: Plan of every array.
        config: Checked settings.
        schedule: Learning rate by applied step, for the metrics.

    Returns:
        The step.

    Raises:
        ConfigError: `distill.teacher` does not fit the model, or the model cannot leave
            out tokens or layers.
        CheckpointError: The run that `distill.teacher` names cannot be read.
        DataError: The outcomes that it names are damaged, or of other settings.
        PlanError: The plan was made on an abstract mesh, without devices.
    """
    if not isinstance(plan.mesh, Mesh):
        problem = "is abstract: its devices are not here"
        remedy = "make the plan on zjax.make_mesh"
        raise PlanError(Problem("plan.mesh", plan.mesh.axis_sizes, problem, remedy))
    num_microbatches = resolve_batch(config, plan.num_batch_shares).num_microbatches
    training = TrainingSchedule(config)
    executor = _make_executor(model, tx, plan, config, schedule, training.exchanges)
    if training.drops:
        check_model(model, config)
    teacher = None
    if config.distill:
        stored = is_stored(config.distill.teacher)
        teacher = (StoredTeacher if stored else Teacher)(config, plan, model)
    return Step(
        mesh=plan.mesh,
        plan=plan,
        model=model,
        num_microbatches=num_microbatches,
        executor=executor,
        inputs=StepInputs(training, plan.replicated, teacher),
        checks_ids=_checks_ids(config, model),
    )


def _make_executor(
    model: Model,
    tx: Any,
    plan: plans.Plan,
    config: Config,
    schedule: Schedule | None,
    exchanges: Exchanges,
) -> Executor:
    """Picks the executor: streamed if offloaded, else of replicas, or fused."""
    if plan.is_offloaded:
        return StreamedExecutor(model, tx, plan, config, schedule)
    if exchanges.sending or exchanges.steps_apart:
        return ReplicasExecutor(model, tx, plan, config, schedule, exchanges)
    return fused_executor(model, tx, plan, config, schedule)


def _checks_ids(config: Config, model: Model) -> bool:
    """Whether ids are checked on the devices; refuses a model without ids."""
    checks = config.data.check_ids == "device"
    if checks and not any(entry.num_ids for entry in model.entries.values()):
        problem = "has no effect: the model says of no array how many ids there are"
        remedy = "leave it at 'host', or set num_ids in the entries of the zjax.Model"
        raise ConfigError(Problem("data.check_ids", "device", problem, remedy))
    return checks
