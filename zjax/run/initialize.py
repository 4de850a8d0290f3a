"""Turns a user's model, optimizer, loss and config into a run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zjax.config.check import check_config
from zjax.config.load import load_beside
from zjax.data.entries import check_batch, entries_of
from zjax.errors import ConfigError, ModelError, Problem
from zjax.estimate.candidates import Own
from zjax.estimate.mesh import choose_mesh, is_open
from zjax.jaxprs.versions import dtype_promotion
from zjax.models import adapter
from zjax.models.contract import with_cast
from zjax.models.rounded import round_params
from zjax.optim.build import with_clipping_as_set
from zjax.run.batch import with_batch_sizes
from zjax.run.build import Run, start_run, unread_schedule
from zjax.run.pruned_start import note_given_batches
from zjax.run.without_effect import check_axes, check_has_effect
from zjax.settings.axes import close_axes
from zjax.settings.derived import is_offered
from zjax.settings.schema import Config
from zjax.sharding.activations import rows_of
from zjax.train.update import Schedule
from zjax.typing import Batch, Device, Entries, Model


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
    if problems := unread_schedule(tx, schedule):
        raise ConfigError(*problems)
    config, own = prepare(
        *(model, tx, loss_fn, batch, config),
        replicated=replicated,
        cast=cast,
        devices=devices,
    )
    model, batch, tx = own
    if is_open(config.mesh):
        config = choose_mesh(config, devices, tx, (model, batch))
        _check(config, len(devices), tx)
    if loss_fn is not None:
        check_axes(config, len(devices), model, batch)
    return start_run(config, model, tx, schedule=schedule, devices=devices, batch=batch)


def prepare(
    model: Any,
    tx: Any,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    config: Any,
    *,
    replicated: Sequence[str],
    cast: Sequence[str] | None,
    devices: Sequence[Device],
) -> tuple[Config, Own]:
    """Checks the arguments of `initialize`, and turns them into pure functions."""
    config = load_beside(tx, {} if config is None else config)
    batch = check_batch(batch, {}, rows_differ=True)
    entries = _entries_of(model, batch, replicated)
    sizes = {leaf.shape[0] for _, leaf in rows_of(batch, entries)}
    num_rows = max(sizes, default=1)
    if _takes_rows(config):
        config = dataclasses.replace(config, global_batch_size=num_rows)
    given = config.mesh
    config = dataclasses.replace(config, mesh=close_axes(given))
    if is_open(given):
        # The rows may fit few meshes: each mesh is checked when it is tried.
        total = config.global_batch_size or num_rows
    else:
        _check(config, len(devices), tx)
        total = with_batch_sizes(config, len(devices)).global_batch_size
    config = _with_rows(config, num_rows, total)
    check_has_effect(config, model)
    note_given_batches(config)
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
        if config.quantize:
            model = round_params(model, config.quantize)
    else:
        model = dataclasses.replace(model, entries=entries)
        model = with_cast(model, batch, cast)
    if tx is not None:
        optimizer = with_clipping_as_set(config.optimizer)
        config = dataclasses.replace(config, optimizer=optimizer)
    with dtype_promotion():
        if tx is not None and loss_fn is not None:
            tx = adapter.adapt_optimizer(tx, user_model, model)
    return dataclasses.replace(config, mesh=given), Own(model, batch, tx)


def _check(config: Config, num_devices: int, tx: Any) -> None:
    """Refuses settings that do not go with a model of the user."""
    check_config(config, num_devices, user_model=True, user_optimizer=tx is not None)


def _takes_rows(config: Config) -> bool:
    """Whether nobody set the rows per step, so that the example batch decides."""
    gives_all = config.num_microbatches and config.microbatch_size
    if config.elasticity or gives_all:
        return is_offered(config.global_batch_size)
    return not config.global_batch_size or is_offered(config.global_batch_size)


def _with_rows(config: Config, num_rows: int, total: int) -> Config:
    """Sets the rows of the batch, or refuses settings of a different number."""
    if total != num_rows:
        problem = f"is not the {num_rows} rows of the batch"
        remedy = f"give batches of {total}, or change the batch sizes"
        raise ConfigError(Problem("global_batch_size", total, problem, remedy))
    return dataclasses.replace(config, global_batch_size=num_rows)


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
