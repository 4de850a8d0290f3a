"""The state of a run: one copy of the model, and what replicas add to exchange less.

With local steps, `master` holds the anchor, the parameters that all replicas shared
last: evaluation, generation and export read `master` as in any other run. Arrays that
differ between replicas have a leading dim of replicas, sharded over `replica`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.errors import CheckpointError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.replicas.exchange import exchanges_by_program
from zjax.replicas.fragments import AVERAGED, EXCHANGED
from zjax.schedule.exchange import make_exchanges
from zjax.settings.schema import Config
from zjax.sharding.layers import take_apart
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan, shardings, unpad_tree
from zjax.sharding.plan import Plan, staged_plan
from zjax.sharding.roles import only_followers, with_followers
from zjax.storage.move import store_all
from zjax.storage.transfers import transfer_budget
from zjax.train.compute_params import high_bits, unsplit_plans
from zjax.train.state import (
    TrainState,
    check_not_consumed,
    first_model_state,
    first_scalars,
    place_given,
    state_of_params,
    state_rows,
)
from zjax.typing import Model, ModelState, Params


class Outer(NamedTuple):
    """`TrainState.extra` of a run with local steps.

    Args:
        replicas: TrainState of every replica, arrays [N, ...]; without `step`.
        momentum: float32 momentum of the outer optimizer, in the form of `master`, with
            None for parameters that are not `EXCHANGED`; an empty tuple if the momentum
            of the replicas serves.
        errors: Error feedback by fragment.
        arriving: Mean outer gradient by fragment, sent last, for a merge `delay` steps
            later; an empty tuple without delay.
    """

    replicas: Any
    momentum: Any
    errors: tuple[Any, ...]
    arriving: tuple[Any, ...]


def of_replicas(state: TrainState) -> TrainState:
    """Returns the state of the replicas, with the common step number."""
    return dataclasses.replace(state.extra.replicas, step=state.step)


def with_extra(state: TrainState, **changes: Any) -> TrainState:
    """Replaces fields of `Outer` in a state."""
    return dataclasses.replace(state, extra=state.extra._replace(**changes))


def averaged_at_ends(state: TrainState, rows: TrainState) -> tuple[Any, Any]:
    """Returns what replicas average at the end of a round, besides fragments."""
    return state.model_state, only_followers(state.master, rows.master, AVERAGED)


def after_round(
    state: TrainState, means: tuple[Any, Any], num_skipped: Any, rows: TrainState
) -> TrainState:
    """Replaces the arrays of `averaged_at_ends` by means, and counts skipped steps."""
    model_state, moved = means
    master = with_followers(moved, state.master, rows.master, AVERAGED)
    return dataclasses.replace(
        state, model_state=model_state, master=master, num_skipped=num_skipped
    )


def run_rows(plan: Plan, config: Config) -> TrainState:
    """Returns the plans of all arrays of a run's state, with what replicas add."""
    rows, exchanges = state_rows(plan, config.precision), make_exchanges(config)
    by_program = exchanges_by_program(plan, exchanges)
    if not exchanges.steps_apart:
        coded = (x.error_rows for x in by_program.values() if x.feeds_back)
        return dataclasses.replace(rows, extra=next(coded, ()))
    by_fragment = [by_program[f"mean_{i}"] for i in range(exchanges.num_fragments)]
    momentum = only_followers(plan.master, plan.master, EXCHANGED)
    means = tuple([_float32(row) for row in each.rows] for each in by_fragment)
    extra = Outer(
        replicas=jax.tree.map(_by_replica, dataclasses.replace(rows, step=())),
        momentum=() if exchanges.outer_phase else jax.tree.map(_float32, momentum),
        errors=tuple(e.error_rows if e.feeds_back else () for e in by_fragment),
        arriving=means if exchanges.delay else (),
    )
    return dataclasses.replace(rows, opt_state=(), scaler=(), extra=extra)


def _by_replica(row: ArrayPlan) -> ArrayPlan:
    """Adds the dim of replicas to the plan of an array."""
    number = row.stored.mesh.shape[REPLICA]

    def place(sharding: NamedSharding) -> NamedSharding:
        return sharding.update(spec=P(REPLICA, *sharding.spec))

    return dataclasses.replace(
        row,
        path=f"extra/replicas/{row.path}",
        shape=(number, *row.shape),
        stored=place(row.stored),
        used=place(row.used),
        # Dim 0 counts replicas now, not layers.
        num_layers=0,
    )


def _float32(row: ArrayPlan) -> ArrayPlan:
    return dataclasses.replace(row, dtype=jnp.dtype("float32"))


def saved_rows(plan: Plan, config: Config) -> TrainState:
    """Returns the plans of a checkpoint: of compute parameters, only high bits."""
    params = high_bits(plan.compute, plan)
    return dataclasses.replace(run_rows(plan, config), params=params)


def saved_state(state: TrainState, plan: Plan) -> TrainState:
    """Returns the state that a checkpoint holds, in the form of `saved_rows`.

    Raises CheckpointError if gradients are pending, StateError if a step consumed the
    state.
    """
    check_not_consumed(state)
    if state.pending:
        problem = "is not applied yet, and a checkpoint does not hold it"
        remedy = "save what step.settle(state) gives"
        raise CheckpointError(Problem("state.pending", "gradient", problem, remedy))
    return dataclasses.replace(state, params=high_bits(state.params, plan))


@dtype_promotion()
def init_state(
    key: jax.Array,
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    *,
    master: Params | None = None,
) -> TrainState:
    """Creates the state of step 0 on the shards; no device holds more than a share.

    Args:
        key: Random key of the initial parameters, which are the same on every mesh.
        model: Supplies existing weights (`given`), placed leaf by leaf, else `init`.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `precision`, `optimizer` and `communication`.
        master: Stored parameters on the shards, used instead of the parameters of the
            model; consumed.

    Returns:
        The state of step 0.
    """
    on_device, rows = staged_plan(plan), run_rows(plan, config)
    places = shardings(run_rows(on_device, config))

    def from_params(params: Params, model_state: ModelState) -> TrainState:
        scalars = first_scalars(config.precision)
        state = state_of_params(params, model_state, scalars, tx, plan)
        return _with_first_extra(state, rows.extra)

    def from_stored(stored: Params, model_state: ModelState) -> TrainState:
        return from_params(unpad_tree(stored, plan.master), model_state)

    def offload(state: TrainState) -> TrainState:
        return store_all(state, rows, transfer_budget(plan.mesh))

    if master is not None:
        model_state = first_model_state(key, model, plan)
    elif model.given is not None:
        params, model_state = model.given()
        masters = unsplit_plans(on_device.master)
        master = place_given(take_apart(params, plan.master), masters)
    else:
        create = jax.jit(
            lambda key: from_params(*model.init(key)), out_shardings=places
        )
        return offload(create(key))
    # Donated: parameters and first state do not exist twice on a device.
    complete = jax.jit(from_stored, out_shardings=places, donate_argnums=0)
    return offload(complete(master, model_state))


def _with_first_extra(state: TrainState, rows: Any) -> TrainState:
    """Adds to the state of one replica what replicas add, by plans of `extra`."""
    if not isinstance(rows, Outer):
        errors = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        return dataclasses.replace(state, extra=errors)
    number = jax.tree.leaves(rows.replicas)[0].shape[0]
    zeros = jax.tree.map(
        lambda row: jnp.zeros(row.stored_shape, row.dtype),
        rows._replace(replicas=()),
    )
    replicas = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (number, *x.shape)),
        dataclasses.replace(state, step=()),
    )
    extra = zeros._replace(replicas=replicas)
    return dataclasses.replace(state, opt_state=(), scaler=(), extra=extra)
