"""Turns a model, an optimizer, a loss and a config into a run: a state and a step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zjax.checkpoint import start as weights
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.data.entries import check_batch, entries_of
from zjax.data.placement import BatchPlacement
from zjax.deepspeed import check_optimizer_is_given
from zjax.errors import ConfigError, ModelError, Problem
from zjax.flax_models.contract import with_cast
from zjax.jaxprs.versions import dtype_promotion
from zjax.models import adapter
from zjax.offload.init import init_layer_by_layer
from zjax.optim.build import make_optimizer, with_clipping_as_set
from zjax.optim.groups import named_params
from zjax.optim.per_layer import per_layer_if_needed
from zjax.processes.agreement import check_agreement
from zjax.processes.barrier import connect
from zjax.processes.host import warn_of_small_pages
from zjax.run.batch import abstract_batch, with_batch_sizes
from zjax.run.fit import check_fits, fit_plan, offloaded_inputs
from zjax.run.resume import fingerprint_functions
from zjax.run.step import Step, make_step
from zjax.run.without_effect import check_axes, check_has_effect, check_loss_acts
from zjax.schedule.learning_rate import make_schedule
from zjax.settings.derived import is_offered
from zjax.settings.parameters import is_adapter, is_held_frozen
from zjax.settings.schema import Config, Lora
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.sharding.activations import rows_of
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.sharding.program_plan import staged_plan
from zjax.storage.transfers import progress_bar
from zjax.train.compute_params import compute_dtype, unsplit_plans
from zjax.train.state import (
    TrainState,
    init_state,
    saved_rows,
    with_params,
)
from zjax.train.update import Schedule
from zjax.typing import Batch, Device, Entries, Metrics, Model
from zjax.weights import adapters, growth, huggingface, peft
from zjax.weights.codes import with_codes
from zjax.weights.source import Entry, Source, name_leaves


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
        if self.model.stack is None or self.model.stack.continuation is None:
            problem, remedy = "writes no text", "use the built-in decoder"
            raise ConfigError(Problem("model", "given", problem, remedy))
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        return self.step.generate(state, tokens, **settings)

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


def initialize(
    model: Any,
    tx: Any,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    config: Any = None,
    *,
    replicated: Sequence[str] = (),
    cast: Sequence[str] | None = None,
    schedule: Schedule | None = None,
    devices: Sequence[Device] | None = None,
) -> Run:
    """Turns a model, an optimizer and a loss into a run on all devices.

    Args:
        model: A Linen module, or a bound module with variables; an NNX module, or a
            function `rngs -> module`, which initialises parameters directly on the
            devices of each shard; a pair of plain functions `(init, apply)`, or
            `(params, apply)`; a dict of several such models; or a `zjax.Model`.
        tx: Optax gradient transformation; None makes the optimizer of
            `config.optimizer`. Gradients are clipped before `tx` if
            `optimizer.clip_norm` is set, as by a ds_config. Masks and labels of `tx`
            are for nested dicts, or made from `nnx.state(module, nnx.Param)`. Layers
            stacked in one array, named `layers`, are updated as if stored apart.
        loss_fn: Function `loss_fn(model, batch, key)` that returns the mean loss, or
            `(loss, weight, metrics)`; None for a `zjax.Model`. A key of None means
            evaluation.
        batch: Global batch or ShapeDtypeStructs, an example of all batches; the first
            dim is `config.global_batch_size` where that is not set. Each device splits
            the local rows into microbatches of adjacent rows, so a loss may compare
            rows of one microbatch. Arrays of `cast` are cast to
            `precision.compute_dtype`; further arrays keep their dtype.
        config: A Config, a mapping, or the path of a config file; None for defaults.
        replicated: Paths of arrays of the batch without rows, such as a table of class
            weights; each device and microbatch gets the whole array.
        cast: Paths of the floating-point arrays to cast. None casts all arrays that
            the model reads, except targets and weights; the plan and `run.model.cast`
            list the cast arrays.
        schedule: Learning rate of `tx` by applied step, for the metrics.
        devices: Devices to use; all by default.

    Returns:
        The run.

    Raises:
        ConfigError: Settings that cannot work, or a schedule without `tx`.
        DataError: The batch is not a tree of numeric arrays with equally many rows, or
            lacks what a `zjax.Model` requires.
        ModelError: A model or a loss of an unsupported kind.
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
    if tx is not None:
        check_optimizer_is_given(config)
    if problems := unread_schedule(tx, schedule):
        raise ConfigError(*problems)
    config = load_config({} if config is None else config)
    batch = check_batch(batch, {}, rows_differ=True)
    entries = _entries_of(model, batch, replicated)
    sizes = {leaf.shape[0] for _, leaf in rows_of(batch, entries)}
    num_rows = max(sizes, default=1)
    if _takes_rows(config):
        config = dataclasses.replace(config, global_batch_size=num_rows)
    check_config(config, len(devices), user_model=True, user_optimizer=tx is not None)
    config = _with_rows(config, num_rows, len(devices))
    check_has_effect(config, model)
    _check_loss(model, loss_fn)
    user_model = model
    if loss_fn is not None:
        model = adapter.adapt(
            model,
            loss_fn,
            batch,
            replicated=replicated,
            cast=cast,
            adapters=config.lora,
        )
        check_axes(config, len(devices), model, batch)
    else:
        model = dataclasses.replace(model, entries=entries)
        model = with_cast(model, batch, cast)
    if tx is not None:
        optimizer = with_clipping_as_set(config.optimizer)
        config = dataclasses.replace(config, optimizer=optimizer)
    with dtype_promotion():
        if tx is not None and loss_fn is not None:
            tx = adapter.adapt_optimizer(tx, user_model, model)
    return start_run(config, model, tx, schedule=schedule, devices=devices, batch=batch)


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


def _takes_rows(config: Config) -> bool:
    """Whether nobody set the rows per step, so that the example batch decides."""
    gives_all = config.num_microbatches and config.microbatch_size
    if config.elasticity or gives_all:
        return is_offered(config.global_batch_size)
    return not config.global_batch_size or is_offered(config.global_batch_size)


def _with_rows(config: Config, num_rows: int, num_devices: int) -> Config:
    """Sets the rows of the batch, or refuses settings of a different number."""
    total = with_batch_sizes(config, num_devices).global_batch_size
    if total != num_rows:
        problem = f"is not the {num_rows} rows of the batch"
        remedy = f"give batches of {total}, or change the batch sizes"
        raise ConfigError(Problem("global_batch_size", total, problem, remedy))
    return dataclasses.replace(config, global_batch_size=num_rows)


def _check_adapters(lora: Lora, model: Model) -> None:
    """Refuses LoRA settings that differ from the adapters of the model."""
    params, _ = jax.eval_shape(model.init, abstract_key())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    adapters = {path_of(k): x for k, x in leaves if is_adapter(path_of(k))}
    if not adapters:
        problem = "adds no adapters to a zjax.Model, whose functions are given"
        remedy = "use zjax.adapt(..., adapters=config.lora), or leave lora out"
        raise ConfigError(Problem("lora.rank", lora.rank, problem, remedy))
    remedy = "give zjax.adapt and the run the same settings"
    ranks = {x.shape[-1] for path, x in adapters.items() if path.endswith("/a")}
    if ranks != {lora.rank}:
        problem = (
            f"is not the rank of the model's adapters ({', '.join(map(str, ranks))})"
        )
        raise ConfigError(Problem("lora.rank", lora.rank, problem, remedy))
    is_dora = any(path.endswith("/magnitude") for path in adapters)
    if is_dora != (lora.form == "dora"):
        problem = "is not the form of the model's adapters"
        raise ConfigError(Problem("lora.form", lora.form, problem, remedy))
    has_codes = any(jnp.issubdtype(x.dtype, jnp.integer) for _, x in leaves)
    if lora.quantize and not has_codes:
        problem = "quantises no matrix but those of the built-in models"
        remedy = "leave it out, or give zjax.make_model(config)"
        kind = lora.quantize.kind
        raise ConfigError(Problem("lora.quantize", kind, problem, remedy))


def _check_loss(model: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Refuses a `zjax.Model` with a loss function, and any other model without."""
    if isinstance(model, Model) != (loss_fn is None):
        problem = "is not needed" if loss_fn else "does not say what to train"
        remedy = "give loss_fn(model, batch, key), or a zjax.Model that has its own"
        name = getattr(loss_fn, "__name__", None)
        raise ModelError(Problem("loss_fn", name, problem, remedy))


def _entries_of(model: Any, batch: Batch, replicated: Sequence[str]) -> Entries:
    """Requirements on batches, from the model or derived from the example batch."""
    entries = model.entries if isinstance(model, Model) else {}
    if not entries:
        return entries_of(batch, replicated=replicated)
    if replicated:
        problem, remedy = "is said by the entries of the model", "leave it out"
        raise ConfigError(Problem("replicated", tuple(replicated), problem, remedy))
    check_batch(batch, entries)
    return entries


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

    Returns:
        The run.

    Raises:
        ProcessError: Processes of the run differ in their settings or software.
        PlanError: Arrays or an optimizer that cannot be placed, or that do not fit.
        ConfigError: `checkpoint.init_from` holds a dense model of another shape, or the
            model has no adapters of `lora`.
        ModelError: Pipelines or offload would train the stack of the model in place of
            the model's loss.
        CheckpointError: `checkpoint.init_from` does not hold this model, or two arrays
            would get the same name in a checkpoint.
    """
    if config.lora:
        _check_adapters(config.lora, model)
    mesh = meshes.make_mesh(config.mesh, devices)
    check_loss_acts(config, model, mesh.shape[meshes.PIPELINE])
    # On a mesh of some processes a collective of all processes would hang.
    if jax.process_count() == len({x.process_index for x in mesh.devices.flat}):
        check_agreement(config)
        connect(mesh)
    plan = fit_plan(config, mesh, model, tx, batch)
    name_leaves(saved_rows(plan, config))  # before training, not at a save
    shapes = abstract_batch(config, plan) if batch is None else batch
    check_fits(plan, config, mesh, offloaded_inputs(model, plan, config, shapes))

    def fresh() -> TrainState:
        start, key = config.checkpoint.init_from, jax.random.key(config.seed)
        adapt = _make_adapt(model, config, key)
        if plan.is_offloaded and (model.init_layer or start):
            staged = unsplit_plans(staged_plan(plan).master)
            initial = weights.iter_weights(start, staged, adapt) if start else None
            # The unsharded parameters of the full model may not fit on the devices.
            return init_layer_by_layer(
                key, model, tx, plan, config.precision, weights=initial
            )
        master = weights.load_weights(start, plan.master, adapt) if start else None
        return init_state(key, model, tx, plan, config, master=master)

    def restored(read: Callable[[TrainState], TrainState]) -> TrainState:
        return with_params(read(saved_rows(plan, config)), plan)

    step = make_step(model, tx, plan, config, schedule=schedule)
    num_local, platform = len(mesh.local_devices), meshes.platform_of(mesh)
    warn_of_small_pages(num_local * memory.stored_bytes(plan).host, platform)
    offloaded_bytes = num_local * memory.stored_bytes(plan).offloaded
    with progress_bar(
        "placing the state", offloaded_bytes if jax.process_index() == 0 else 0
    ):
        state = restored(restore) if restore else fresh()
        if not restore and (start := config.checkpoint.init_from):
            known = weights.load_model_state(start, state.model_state, plan.model_state)
            state = dataclasses.replace(state, model_state=known)
    return Run(
        config=config,
        model=model,
        mesh=mesh,
        plan=plan,
        state=state,
        step=step,
    )


def _make_adapt(model: Model, config: Config, key: jax.Array) -> weights.Adapt:
    """Returns a function that fits weights of `checkpoint.init_from` to the model."""
    initial = growth.initial_values(model.init, key)
    shape, start, lora = config.model, config.checkpoint, config.lora
    dtype = config.precision.compute_dtype
    is_frozen = functools.partial(is_held_frozen, config=config)

    def adapt(source: Source, wanted: Mapping[str, Entry]) -> Source:
        # The order matters: each conversion reads names and shapes that the last one
        # made.
        config_json = weights.find_config(start.init_from)
        source = huggingface.adapted(source, wanted, config_json, shape, start)
        source = growth.resized(source, wanted, start, shape.vocab_size, is_frozen)
        source = growth.upcycled(source, wanted, shape, start, config.seed, initial)
        source = with_codes(source, wanted)
        if lora and lora.init_from:
            return peft.with_peft(source, wanted, lora, shape, config_json)
        if lora:
            return adapters.with_adapters(source, wanted, dtype, initial)
        return source

    return adapt
