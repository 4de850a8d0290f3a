"""Averaged weights for evaluation.

A state has averages by `optimizer.ema_decay`, or from `optax.contrib.schedule_free`,
which stores the raw weights at the point of the gradients (Defazio et al.,
arXiv:2405.15682). Evaluation, generation and export use the first of `ema`,
`schedule_free` and `raw` that a state has, unless the caller names a part.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, get_args

import jax
import optax
from optax import contrib

from zjax.errors import ConfigError, PlanError, Problem
from zjax.sharding.placement import unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.roles import frozen, joined, trained
from zjax.train.state import TrainState
from zjax.typing import Params

Part = Literal["auto", "ema", "schedule_free", "raw"]
"""Weights of a state by name; `auto` is the first name of `parts_of`."""
PARTS: tuple[Part, ...] = get_args(Part)


def parts_of(state: TrainState) -> tuple[Part, ...]:
    """Lists the weights that a state holds; the first is the default for evaluation."""
    ema: tuple[Part, ...] = () if state.ema == () else ("ema",)
    free: tuple[Part, ...] = ("schedule_free",) if _schedule_free(state) else ()
    return (*ema, *free, "raw")


def choose_part(part: str, parts: tuple[Part, ...]) -> Part:
    """Resolves `auto`, and refuses weights that a state does not hold."""
    if part == "auto":
        return parts[0]
    for known in parts:
        if known == part:
            return known
    remedy = f"use auto, or one of {', '.join(parts)}"
    raise ConfigError(Problem("part", part, "is not kept in this run", remedy))


def with_part(state: TrainState, part: str) -> TrainState:
    """Returns a state that evaluates with the weights `part`, for readers alone.

    Args:
        state: State of the run; not consumed.
        part: Name of the weights: `auto`, or one of `parts_of(state)`.

    Raises:
        ConfigError: The state does not hold these weights.
    """
    parts = parts_of(state)
    part = choose_part(part, parts)
    if part == "raw":
        # Without EMA and optimizer state, `averaged` finds no average.
        return dataclasses.replace(state, ema=(), opt_state=())
    return state if part == parts[0] else dataclasses.replace(state, ema=())


def only_weights(state: TrainState, plan: Plan) -> TrainState:
    """Drops all arrays that the weights for evaluation do not depend on.

    With an EMA, that is None for all master weights except frozen parameters.
    """
    part, master = parts_of(state)[0], state.master
    if part == "ema":
        master = frozen(master, plan.master)
    read_by = {"ema": ("master", "ema"), "schedule_free": ("master", "opt_state")}
    read = read_by.get(part, ("master",))
    names = (field.name for field in dataclasses.fields(state))
    others = {name: () for name in names if name not in read}
    return dataclasses.replace(state, master=master, **others)


def averaged(state: TrainState, plan: Plan) -> Params | None:
    """Returns the averaged weights in logical shapes, with the frozen parameters.

    None if the state has no average.
    """
    rows = plan.master
    held = unpad_tree(frozen(state.master, rows), frozen(rows, rows))
    if state.ema != ():
        return joined(unpad_tree(state.ema, plan.ema), held, rows)
    if not _schedule_free(state):
        return None
    params = unpad_tree(trained(state.master, rows), trained(rows, rows))
    opt_state = unpad_tree(state.opt_state, plan.opt_state)
    # One average per parameter group; each replaces only the parameters of the group.
    for average in _schedule_free(dataclasses.replace(state, opt_state=opt_state)):
        params = _of_group(average, params)
    return joined(params, held, rows)


def check_average(state: TrainState, plan: Plan) -> None:
    """Raises PlanError if `schedule_free` weights depend on offloaded state."""
    if plan.is_offloaded and state.ema == () and _schedule_free(state):
        problem = "has averaged weights whose parts rest elsewhere"
        remedy = "use zero.offload=None, or part='raw'"
        raise PlanError(Problem("tx", "schedule_free", problem, remedy))


def check_moved(moved: Collection[str], opt_state: Any) -> None:
    """Raises PlanError if totals move parameters that `schedule_free` averages.

    The average would extrapolate from the values before the move. `opt_state` may be a
    tree of plans.
    """
    if moved and _of_optimizer(opt_state):
        problem = f"averages {min(moved)}, which moves without a gradient"
        remedy = "use another optimizer"
        raise PlanError(Problem("tx", "schedule_free", problem, remedy))


def _schedule_free(state: TrainState) -> list[contrib.ScheduleFreeState]:
    return _of_optimizer(state.opt_state)


def _of_optimizer(opt_state: Any) -> list[contrib.ScheduleFreeState]:
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)
    return [leaf for leaf in leaves if _is_schedule_free(leaf)]


def _is_schedule_free(x: Any) -> bool:
    return isinstance(x, contrib.ScheduleFreeState)


def _of_group(state: contrib.ScheduleFreeState, params: Params) -> Params:
    """Replaces the parameters that one transformation updates by averages."""
    updated = jax.tree.map(
        lambda z, x: z if _is_masked(z) else x, state.z, params, is_leaf=_is_masked
    )
    return jax.tree.map(
        lambda mean, x: x if _is_masked(mean) else mean,
        contrib.schedule_free_eval_params(state, updated),
        params,
        is_leaf=_is_masked,
    )


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
