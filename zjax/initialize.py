"""From a model, an optimizer, a loss and a config to a run: a state and a step."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zjax.checkpoint import weights
from zjax.config.batch import resolve_batch
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.config.schema import Config
from zjax.errors import ConfigError, DataError, ModelError, PlanError, Problem
from zjax.models import adapter
from zjax.optim.build import make_optimizer
from zjax.optim.schedules import make_schedule
from zjax.sharding import memory, placement
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.train.gradients import check_batch, compute_params
from zjax.train.programs import Programs, make_programs
from zjax.train.state import TrainState, init_state, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Device, Metrics, Model, Params


@dataclasses.dataclass(frozen=True)
class Step:
    """`step(state, batch) -> (state, metrics)`: compiled programs on placed batches.

    The state that goes in is donated: keep the one that comes out.

    Args:
        mesh: The devices.
        plan: Places batches.
        rows: The places of the state's arrays.
        num_microbatches: Gradient accumulation.
        programs: The compiled functions by name.
    """

    mesh: Mesh
    plan: plans.Plan
    rows: TrainState
    num_microbatches: int
    programs: Mapping[str, Any]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step.

        Args:
            state: Arrays placed by the plan; consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            The next state, and float32 scalars still on the device.

        Raises:
            PlanError: The batch does not divide over the devices.
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
            PlanError: The batch does not divide over the devices.
        """
        return self._call("evaluate", state, self.place_batch(batch))

    def place_batch(self, batch: Batch) -> Batch:
        """Puts a batch on the devices; what is there already stays.

        Args:
            batch: Arrays of the global batch; in a run of many processes, NumPy arrays
                are this process's share of it.

        Returns:
            Global arrays on the plan's batch sharding.

        Raises:
            PlanError: The batch does not divide over the devices.
        """
        check_arrays(batch)
        num_shares = self.plan.num_batch_shares
        check_batch(batch, 1, max(1, num_shares // jax.process_count()))

        def place(x: Any) -> jax.Array:
            sharding = self.plan.batch_sharding(x)
            if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(
                sharding, x.ndim
            ):
                return x
            if jax.process_count() == 1:
                return jax.device_put(x, sharding)
            return jax.make_array_from_process_local_data(sharding, x)

        return jax.tree.map(place, batch)

    def compile(self, batch: Batch, program: str = "train") -> jax.stages.Compiled:
        """Compiles without running, for its memory analysis and its text.

        Args:
            batch: Arrays or ShapeDtypeStructs of the global batch.
            program: A name in `programs`.

        Returns:
            The compiled program; ask it for `memory_analysis()`.

        Raises:
            PlanError: The batch does not divide over the devices.
        """
        check_batch(batch, self.num_microbatches, self.plan.num_batch_shares)

        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            sharding = self.plan.batch_sharding(x)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = placement.abstract_tree(self.rows)
        with jax.set_mesh(self.mesh):
            lowered = self.programs[program].lower(state, jax.tree.map(abstract, batch))
        return lowered.compile()

    def _call(self, program: str, *args: Any) -> Any:
        # Losses read from the mesh in how many shares the batch is.
        with jax.set_mesh(self.mesh):
            results = self.programs[program](*args)
        if self.mesh.devices.flat[0].platform == "cpu":
            # Simulated devices share few threads: the collectives of many steps in
            # flight take them from each other, and wait for ever.
            jax.block_until_ready(results)
        return results


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
        tx: Optax gradient transformation.
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
    pure = make_programs(
        model, tx, plan, config, num_microbatches=num_microbatches, schedule=schedule
    )
    return Step(
        mesh=plan.mesh,
        plan=plan,
        rows=state_rows(plan, config),
        num_microbatches=num_microbatches,
        programs=compile_programs(pure),
    )


def compile_programs(pure: Programs) -> dict[str, Any]:
    """The programs under `jit`, by name.

    Args:
        pure: Functions and the shardings of the state.

    Returns:
        `train`, one program, and `evaluate`; and the two halves of `train` for runs
        that do something between them.
    """
    places = pure.state_shardings
    return {
        "train": jax.jit(pure.train, donate_argnums=0, out_shardings=(places, None)),
        "gradients": jax.jit(pure.gradients),
        "update": jax.jit(
            pure.update, donate_argnums=(0, 1), out_shardings=(places, None)
        ),
        "evaluate": jax.jit(pure.evaluate),
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """What `initialize` returns; calling `step` changes nothing in it.

    Args:
        config: The checked settings.
        model: The model as pure functions.
        mesh: The devices.
        plan: The place of every array; print it.
        state: The first state; it is consumed by the first step.
        step: `step(state, batch) -> (state, metrics)`.
        bind: `bind(state)` gives the module in evaluation mode.
    """

    config: Config
    model: Model
    mesh: Mesh
    plan: plans.Plan
    state: TrainState
    step: Step
    bind: Callable[[TrainState], Any]

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Loss and metrics without gradients, dropout or state change.

        Args:
            state: Any state of this run; not consumed.
            batch: NumPy or JAX arrays, first dim the global batch.

        Returns:
            float32 scalars still on the device.
        """
        return self.step.evaluate(state, batch)


def initialize(
    model: Any,
    tx: Any,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    config: Any = None,
    *,
    schedule: Schedule | None = None,
    devices: Sequence[Device] | None = None,
) -> Run:
    """Turns a model, an optimizer and a loss into a run on all devices.

    Args:
        model: A Linen module; an NNX module, or a function `rngs -> module`, which lets
            the parameters be born on their shards; a pair of plain functions
            `(init, apply)`; a dict of several; or a `zjax.Model`.
        tx: Optax gradient transformation, used as it is: add
            `optax.clip_by_global_norm` to clip. None makes the one of
            `config.optimizer`.
        loss_fn: `loss_fn(model, batch, key)` returns the mean loss, or `(loss, weight,
            metrics)`. A key of None means evaluation. None for a `zjax.Model`.
        batch: A global batch or its ShapeDtypeStructs; its first dim takes the place of
            `config.global_batch_size`. Floating-point arrays of two dims or more are
            cast to `precision.compute_dtype`.
        config: A Config, a mapping, or the path of a config file; None for defaults.
        schedule: Learning rate by applied step, to be shown among the metrics.
        devices: Devices to use; all of them by default.

    Returns:
        The run.

    Raises:
        ConfigError: Settings that cannot work.
        ModelError: A model or a loss of no known kind.
        PlanError: Arrays or an optimizer that cannot be placed.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> def loss_fn(model, batch, key):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> def init(key):
        ...     return {"w": jnp.zeros((4, 1))}
        >>> def apply(params, x):
        ...     return x @ params["w"]
        >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
        >>> run = initialize((init, apply), optax.sgd(0.1), loss_fn, batch)
        >>> state, metrics = run.step(run.state, batch)
        >>> float(metrics["loss"])
        1.0
    """
    devices = jax.devices() if devices is None else devices
    config = load_config({} if config is None else config)
    check_arrays(batch)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if len(leaf.shape)}
    config = dataclasses.replace(config, global_batch_size=max(sizes, default=1))
    check_config(config, len(devices), own_model=True, own_optimizer=tx is not None)
    if config.precision.on_nonfinite == "stop":
        problem = "is read by zjax.Trainer alone"
        remedy = "look at metrics['skipped_steps'], or leave it at 'skip'"
        raise ConfigError(Problem("precision.on_nonfinite", "stop", problem, remedy))
    if isinstance(model, Model) != (loss_fn is None):
        given = "is not needed" if loss_fn else "does not say what to train"
        remedy = "give loss_fn(model, batch, key), or a zjax.Model that has its own"
        name = getattr(loss_fn, "__name__", None)
        raise ModelError(Problem("loss_fn", name, given, remedy))
    if loss_fn is not None:
        model = adapter.adapt(model, loss_fn, batch)
    if tx is None:
        tx = make_optimizer(config, model)
        schedule = make_schedule(config)
    else:
        config = without_clipping(config)
    return make_run(config, model, tx, schedule=schedule, devices=devices)


def make_run(
    config: Config,
    model: Model,
    tx: Any,
    *,
    schedule: Schedule | None = None,
    devices: Sequence[Device] | None = None,
    restore: Callable[[TrainState], TrainState] | None = None,
) -> Run:
    """Plans, creates the state and builds the step.

    Args:
        config: Checked settings.
        model: The model as pure functions.
        tx: Optax gradient transformation.
        schedule: Learning rate by applied step, for the metrics.
        devices: Devices to use; all of them by default.
        restore: Makes the first state from the rows of its arrays, such as from a
            checkpoint; a fresh state by default.

    Returns:
        The run.

    Raises:
        PlanError: Arrays or an optimizer that cannot be placed, or that do not fit.
        CheckpointError: `checkpoint.init_from` does not hold this model.
    """
    mesh = meshes.make_mesh(config.mesh, devices)
    plan = plans.make_plan(config, mesh, model, tx)
    memory.check_memory(plan, device_capacity_bytes(mesh))

    def fresh() -> TrainState:
        start = config.checkpoint.init_from
        master = weights.load_safetensors(start, plan.master) if start else None
        key = jax.random.key(config.seed)
        return init_state(key, model, tx, plan, config, master=master)

    def bind(state: TrainState) -> Any:
        return model.bind(model_params(state, plan), state.model_state)

    return Run(
        config=config,
        model=model,
        mesh=mesh,
        plan=plan,
        state=restore(state_rows(plan, config)) if restore else fresh(),
        step=make_step(model, tx, plan, config, schedule=schedule),
        bind=bind,
    )


def without_clipping(config: Config) -> Config:
    """The settings of a run whose optimizer the caller brings, to be used as it is.

    Args:
        config: Settings that `check_config` has found free of other optimizer settings.

    Returns:
        The same without clipping by the step.
    """
    optimizer = dataclasses.replace(config.optimizer, clip_norm=math.inf)
    return dataclasses.replace(config, optimizer=optimizer)


def check_arrays(batch: Batch) -> None:
    """Refuses a batch whose leaves are not arrays.

    Args:
        batch: A tree.

    Raises:
        DataError: Names every leaf that has no shape or no dtype.
    """
    problems = [
        Problem(
            f"batch/{placement.path_of(keys)}",
            type(leaf).__name__,
            "is not an array",
            "use numpy.asarray",
        )
        for keys, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    ]
    if problems:
        raise DataError(*problems)


def model_params(state: TrainState, plan: plans.Plan) -> Params:
    """The parameters as the model sees them, for use outside of `step`.

    Args:
        state: Any state of the run; the averaged parameters are taken where kept.
        plan: The plan of the run.

    Returns:
        Arrays in the compute dtype and their logical shapes, placed as in a step.
    """

    def place(row: placement.Row) -> jax.sharding.NamedSharding:
        padded = row.shape != row.stored_shape
        return plan.replicated if padded else row.sharding

    def compute(stored: Params) -> Params:
        return compute_params(placement.unpad_tree(stored, plan.master), plan)

    places = jax.tree.map(place, plan.compute)
    params = state.master if state.ema == () else state.ema
    return jax.jit(compute, out_shardings=places)(params)


def device_capacity_bytes(mesh: Mesh) -> float:
    """Memory that the smallest device of a mesh offers.

    Args:
        mesh: The devices; only those of this process are asked.

    Returns:
        Bytes; infinite where the device does not say, as a CPU.
    """
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min((s.get("bytes_limit", float("inf")) for s in stats), default=0.0)
