"""The state of a run: everything that a step changes, created shard by shard."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np

from zjax.errors import Problem, StateError
from zjax.optim import precision
from zjax.settings.schema import Precision
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import (
    ArrayPlan,
    pad,
    pad_tree,
    place_tree,
    shardings,
    unpad,
)
from zjax.sharding.plan import Plan, staged_plan, trained_plan
from zjax.sharding.roles import frozen, joined, trained
from zjax.storage.array import DiskArray
from zjax.storage.move import store, store_in_turn, to_devices
from zjax.storage.transfers import transfer_budget
from zjax.train.compute_params import (
    compute_param,
    compute_params,
    computed_once,
    stored_master,
)
from zjax.typing import Model, ModelState, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes, in stored (padded) shapes.

    Args:
        step: int32[]; steps taken, skipped ones included.
        num_skipped: int32[]; steps that did not apply: a gradient was not finite, or
            the weight of the batch was 0.
        master: Parameters in `precision.master_dtype`, or low bits of parameters;
            frozen parameters in `precision.compute_dtype`.
        opt_state: State of the optimizer.
        model_state: BatchNorm statistics and the like.
        scaler: Loss scale of float16; an empty tuple otherwise.
        ema: Averaged parameters, None if frozen; or an empty tuple.
        extra: State of an algorithm, or an empty tuple.
        params: Compute parameters if master weights are offloaded, None if frozen; an
            empty tuple otherwise.
        pending: Gradients that the next step applies, or an empty tuple.
    """

    step: Any
    num_skipped: Any
    master: Any
    opt_state: Any
    model_state: Any
    scaler: Any = ()
    ema: Any = ()
    extra: Any = ()
    params: Any = ()
    pending: Any = ()

    def __repr__(self) -> str:
        if _is_consumed(self):
            return "TrainState(consumed by a step; the step returned the next state)"
        fields = (
            f"{x.name}={getattr(self, x.name)!r}" for x in dataclasses.fields(self)
        )
        return f"TrainState({', '.join(fields)})"


def check_not_consumed(state: TrainState) -> None:
    """Refuses a state that was donated to a step: XLA may abort on deleted arrays."""
    if _is_consumed(state):
        problem = "was passed to a step, which used its memory for the next state"
        remedy = (
            "pass what the step returned, `state, metrics = run.step(state, batch)`"
        )
        remedy += ", or make the run anew"
        raise StateError(Problem("state", "consumed", problem, remedy))


def _is_consumed(state: TrainState) -> bool:
    """Whether a step has deleted an array of a state."""
    return any(
        leaf.is_deleted()
        for leaf in jax.tree.leaves(state)
        # Tracers stand for arrays that are alive while a program is traced.
        if hasattr(leaf, "is_deleted") and not isinstance(leaf, jax_core.Tracer)
    )


def state_rows(plan: Plan, settings: Precision) -> TrainState:
    """Returns the plans of the state of one copy of the model, as a TrainState."""
    counter = jnp.dtype(jnp.int32)
    scaler = jax.tree.map(
        lambda leaf: plan.scalar("scaler", leaf.dtype),
        jax.eval_shape(lambda: _init_scaler(settings)),
    )
    return TrainState(
        step=plan.scalar("step", counter),
        num_skipped=plan.scalar("num_skipped", counter),
        master=plan.master,
        opt_state=plan.opt_state,
        model_state=plan.model_state,
        scaler=scaler,
        ema=plan.ema,
        params=trained(plan.compute, plan.master) if plan.is_offloaded else (),
    )


def first_model_state(key: jax.Array, model: Model, plan: Plan) -> ModelState:
    """Creates the model state of step 0, without tracing a model that has none."""
    if not jax.tree.leaves(plan.model_state):
        return plan.model_state
    places = shardings(plan.model_state)
    return jax.jit(lambda key: model.init(key)[1], out_shardings=places)(key)


def state_of_params(
    params: Params,
    model_state: ModelState,
    scalars: Mapping[str, Any],
    tx: Any,
    plan: Plan,
) -> TrainState:
    """Builds the state of step 0 on the devices, from parameters in logical shapes.

    `scalars` are the fields that `first_scalars` returns.
    """
    on_device = staged_plan(plan)
    params = take_apart(params, plan.master)
    params = jax.tree.map(lambda x, row: x.astype(row.dtype), params, plan.master)
    params = jax.tree.map(computed_once, params, plan.master)
    params = place_tree(params, on_device.master)
    stored = pad_tree(params, plan.master)
    ema, compute = (), ()
    opt_state = pad_tree(tx.init(trained(params, plan.master)), plan.opt_state)
    if plan.ema:
        ema = trained(stored, plan.master)
        ema = jax.tree.map(lambda x, row: x.astype(row.dtype), ema, plan.ema)
    if plan.is_offloaded:
        compute = pad_tree(compute_params(params, on_device), plan.compute)
        compute = trained(compute, plan.master)
    return TrainState(
        **scalars,
        master=jax.tree.map(stored_master, stored, plan.master),
        opt_state=opt_state,
        model_state=model_state,
        ema=ema,
        params=compute,
    )


def with_params(state: TrainState, plan: Plan) -> TrainState:
    """Adds the compute parameters that checkpoints omit; without offload, adds none."""
    if not plan.is_offloaded:
        return state
    learned = trained_plan(plan)
    arrays, tree = jax.tree.flatten(trained(state.master, plan.master))
    none = [None] * len(arrays)
    saved = none if state.params == () else tree.flatten_up_to(state.params)
    rows = jax.tree.leaves(learned.master), jax.tree.leaves(learned.compute)
    missing = [
        (x, *places)
        for x, param, *places in zip(arrays, saved, *rows, strict=True)
        if param is None
    ]
    # Take a third of the budget: the master weights staged on the device for each array
    # may take twice its bytes.
    budget = transfer_budget(plan.mesh) // 3
    computed = iter(list(store_in_turn(_compute_params(missing), budget)))
    params = tree.unflatten(next(computed) if x is None else x for x in saved)
    return dataclasses.replace(state, params=params)


def _compute_params(
    stored: Sequence[tuple[Any, ArrayPlan, ArrayPlan]],
) -> Iterator[tuple[jax.Array, ArrayPlan]]:
    """Yields compute parameters on the devices, cast from stored master weights."""
    for i, (x, row, compute) in enumerate(stored):
        for following, _, _ in stored[i + 1 : i + 2]:
            if isinstance(following, DiskArray):
                # Read the next array from disk while this array is cast.
                following.prefetch()
        on_device = to_devices(x, row, is_consumed=False)
        yield cast_param(on_device, row, compute), compute


def without_update(state: TrainState, plan: Plan) -> TrainState:
    """Drops the arrays that only an update reads.

    Of the master weights, frozen parameters stay.
    """
    held = frozen(state.master, plan.master)
    return dataclasses.replace(state, master=held, opt_state=(), pending=())


def stored_compute(state: TrainState, plan: Plan) -> Params:
    """Returns stored compute parameters, with frozen ones from the master weights."""
    return joined(state.params, state.master, plan.master)


def cast_param(x: jax.Array, row: ArrayPlan, compute: ArrayPlan) -> jax.Array:
    """Casts master weights, in stored shapes on the devices, to a compute parameter."""
    return _cast(x, row.staged, compute.staged)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(x: jax.Array, stored: ArrayPlan, row: ArrayPlan) -> jax.Array:
    return pad(compute_param(unpad(x, stored), stored, row), row)


def first_scalars(settings: Precision) -> dict[str, Any]:
    """Returns counters and loss scale of step 0, as fields of `TrainState` by name."""
    return {
        "step": jnp.zeros((), jnp.int32),
        "num_skipped": jnp.zeros((), jnp.int32),
        "scaler": _init_scaler(settings),
    }


def place_given(params: Any, rows: Any) -> Any:
    """Copies host arrays in logical shapes onto shards, one array at a time."""

    def place(x: Any, row: ArrayPlan) -> Any:
        # Padding is 0 in every stored array.
        stored = np.zeros(row.stored_shape, row.stored_dtype)
        stored[tuple(map(slice, row.shape))] = np.asarray(x)
        # Each process copies the local shards alone.
        placed = jax.make_array_from_callback(
            row.stored_shape, row.stored, stored.__getitem__
        )
        return store(placed, row) if row.is_on_disk else placed

    return jax.tree.map(place, params, rows)


def _init_scaler(settings: Precision) -> Any:
    if settings.compute_dtype != "float16":
        return ()
    return precision.init_scaler(settings.loss_scale)
