"""One optimizer step as a host function over compiled programs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zjax.compiler import Options, step_options
from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.data.entries import check_batch, check_placed_ids
from zjax.errors import ConfigError, PlanError, Problem
from zjax.offload.generate import Generation
from zjax.offload.parts import Jit
from zjax.offload.peak import Peak, predict_peak
from zjax.offload.segments import Segments
from zjax.offload.train import OffloadedTrain
from zjax.ops.promotion import dtype_promotion
from zjax.sharding import placement
from zjax.sharding import plan as plans
from zjax.sharding.batch import batch_shardings
from zjax.sharding.in_use import plan_on_device
from zjax.sharding.mesh import is_simulated
from zjax.train.average import check_average
from zjax.train.gradients import microbatches
from zjax.train.programs import Programs, make_programs
from zjax.train.state import (
    TrainState,
    check_not_consumed,
    state_rows,
    without_update,
)
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


@dataclasses.dataclass(frozen=True)
class Step:
    """`step(state, batch) -> (state, metrics)`: compiled programs on placed batches.

    The state that goes in is donated: keep the one that comes out.

    Args:
        mesh: The devices.
        plan: Places batches.
        rows: The places of the state's arrays.
        model: What its loss asks of a batch.
        num_microbatches: Gradient accumulation.
        programs: The compiled functions by name.
        checks_ids: Whether ids of batches on devices are checked, too.
    """

    mesh: Mesh
    plan: plans.Plan
    rows: TrainState
    model: Model
    num_microbatches: int
    programs: Mapping[str, Any]
    checks_ids: bool = False

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step.

        Args:
            state: Arrays placed by the plan; consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            The next state, and float32 scalars still on the device.

        Raises:
            PlanError: The batch does not divide over the devices.
            StateError: The state was consumed before.
        """
        return self._call("train", state, self.place_batch(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Loss and metrics without gradients, dropout or state change.

        Args:
            state: Arrays placed by the plan; not consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            float32 scalars still on the device.

        Raises:
            PlanError: The batch does not divide over the devices, or the averaged
                weights of the optimizer rest elsewhere.
            StateError: The state was consumed before.
        """
        check_average(state, self.plan)
        return self._call("evaluate", state, self.place_batch(batch))

    def settle(self, state: TrainState) -> TrainState:
        """Applies a gradient that a delayed update left for the next step.

        Args:
            state: Arrays placed by the plan; consumed.

        Returns:
            The state with nothing pending, such as a checkpoint holds.

        Raises:
            StateError: The state was consumed before.
        """
        check_not_consumed(state)
        train = self.programs["train"]
        if not isinstance(train, OffloadedTrain):
            return state
        with jax.set_mesh(self.mesh), dtype_promotion():
            return train.settle(state)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts with parameters that come up block by block.

        Args:
            state: Arrays placed by the plan; not consumed.
            tokens: Prompts, int32[B, L].
            settings: Other arguments of `zjax.generate`.

        Returns:
            Prompts and continuations, int32[B, L + max_new_tokens].

        Raises:
            PlanError: They are on the devices: `zjax.generate` is faster then.
            ConfigError: A setting out of range, or no room for the tokens.
            StateError: The state was consumed before.
        """
        if "generate" not in self.programs:
            problem, remedy = "leaves blocks on the devices", "use zjax.generate"
            raise PlanError(Problem("zero.parameter_memory", "device", problem, remedy))
        return self._call("generate", state, tokens, **settings)

    def place_batch(self, batch: Batch) -> Batch:
        """Puts a batch on the devices; what is there already stays.

        Args:
            batch: Arrays of the global batch; in a run of many processes, NumPy arrays
                are the rows that devices of this process hold, which are all rows where
                a pipeline or a sequence goes through every process.

        Returns:
            Global arrays on the plan's batch sharding.

        Raises:
            DataError: The batch is not what the loss asks for.
            PlanError: The batch does not divide over the devices.
        """
        batch = check_batch(batch, self.model.entries)
        num_shares = self.plan.num_batch_shares
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
            check_placed_ids(placed, self.model.entries)
        return placed

    def batch_shardings(self, batch: Batch) -> Any:
        """The placement of a batch.

        Args:
            batch: Arrays or their shapes.

        Returns:
            A tree of shardings.
        """
        return batch_shardings(self.plan, batch, self.model.entries)

    def compile(
        self, batch: Batch, program: str = "train"
    ) -> jax.stages.Compiled | None:
        """Compiles without running, for its memory analysis and its text.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.
            program: A name in `programs`.

        Returns:
            The compiled program; ask it for `memory_analysis()`. None for a step of
            many programs, as one that moves its state is.

        Raises:
            PlanError: The batch does not divide over the devices.
        """
        number, shares = self.num_microbatches, self.plan.num_batch_shares
        microbatches.check_batch(batch, self.model, number, shares)
        microbatches.check_lengths(batch, self.model, self.plan.num_length_shares)
        if not hasattr(self.programs[program], "lower"):
            return None

        def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = placement.abstract_tree(self.rows)
        batch = jax.tree.map(abstract, batch, self.batch_shardings(batch))
        with jax.set_mesh(self.mesh), dtype_promotion():
            lowered = self.programs[program].lower(state, batch)
        return lowered.compile()

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles the programs of a step that moves its state, without running them.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.

        Returns:
            What is on a device when the step takes most; None for a step of one
            program, and where a compiler does not say.
        """
        train = self.programs["train"]
        if not isinstance(train, OffloadedTrain):
            return None
        with jax.set_mesh(self.mesh), dtype_promotion():
            return predict_peak(train, batch)

    def _call(
        self, program: str, state: TrainState, *args: Any, **settings: Any
    ) -> Any:
        check_not_consumed(state)
        # Losses read from the mesh in how many shares the batch is.
        with jax.set_mesh(self.mesh), dtype_promotion():
            results = self.programs[program](state, *args, **settings)
        return jax.block_until_ready(results) if is_simulated(self.mesh) else results


def make_step(
    model: Model,
    tx: Any,
    plan: plans.Plan,
    config: Config,
    *,
    schedule: Schedule | None = None,
) -> Step:
    """Builds the step of a run; it compiles at its first call.

    Args:
        model: Its loss.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        plan: Places every array.
        config: The settings.
        schedule: Learning rate by applied step, for the metrics.

    Returns:
        The step.

    Raises:
        PlanError: The plan was made for devices that are not here.
    """
    if not isinstance(plan.mesh, Mesh):
        problem = "is abstract: its devices are not here"
        remedy = "make the plan on zjax.make_mesh"
        raise PlanError(Problem("plan.mesh", plan.mesh.axis_sizes, problem, remedy))
    num_microbatches = resolve_batch(config, plan.num_batch_shares).num_microbatches
    passing = plan_on_device(plan) if plan.is_offloaded else plan
    pure = make_programs(
        model,
        tx,
        passing,
        config,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    options = step_options(config, plan)
    programs = compile_programs(pure, options)
    if plan.is_offloaded:
        jit = functools.partial(_jit_in_turn, plan.mesh, options)
        streamed = OffloadedTrain(
            model,
            tx,
            plan,
            config,
            num_microbatches=num_microbatches,
            schedule=schedule,
            jit=jit,
        )
        evaluate = programs["evaluate"]
        programs = {
            "train": streamed,
            "evaluate": lambda state, batch: evaluate(without_update(state), batch),
        }
        backward, where = streamed.backward, config.zero.parameter_memory
        if where != plans.DEVICE and isinstance(backward, Segments):
            programs |= _programs_by_block(backward, jit)
    return Step(
        mesh=plan.mesh,
        plan=plan,
        rows=state_rows(plan, config),
        model=model,
        num_microbatches=num_microbatches,
        programs=programs,
        checks_ids=_checks_ids(config, model),
    )


def _checks_ids(config: Config, model: Model) -> bool:
    checks = config.data.check_ids == "device"
    if checks and not any(entry.num_ids for entry in model.entries.values()):
        problem = "has no effect: the model says of no array how many ids there are"
        remedy = "leave it at 'host', or set num_ids in the entries of the zjax.Model"
        raise ConfigError(Problem("data.check_ids", "device", problem, remedy))
    return checks


def _programs_by_block(passes: Segments, jit: Jit) -> dict[str, Any]:
    found: dict[str, Any] = {"evaluate": passes.evaluate}
    if passes.stack.continuation:
        found["generate"] = Generation(passes.stack.continuation, passes.blocks, jit)
    return found


def _jit_in_turn(
    mesh: Mesh, options: Options, function: Callable[..., Any], **settings: Any
) -> Callable[..., Any]:
    run = jax.jit(function, compiler_options=options, **settings)
    if not is_simulated(mesh):
        return run

    @functools.wraps(run)
    def run_alone(*args: Any) -> Any:
        return jax.block_until_ready(run(*args))

    run_alone.lower = run.lower  # type: ignore[attr-defined]
    return run_alone


def compile_programs(pure: Programs, options: Options) -> dict[str, Any]:
    """The programs under `jit`, by name.

    Args:
        pure: Functions and the shardings of the state.
        options: Of the compiler.

    Returns:
        `train`, one program, and `evaluate`; and the two halves of `train` for runs
        that do something between them.
    """
    jit = functools.partial(jax.jit, compiler_options=options)
    places = pure.state_shardings
    return {
        "train": jit(pure.train, donate_argnums=0, out_shardings=(places, None)),
        "gradients": jit(pure.gradients),
        "update": jit(pure.update, donate_argnums=0, out_shardings=(places, None)),
        "evaluate": jit(pure.evaluate),
    }
