"""Which weights of a state a model is evaluated with: as trained, or averaged.

A run keeps averages in one of two ways: `optimizer.ema_decay`, or an optimizer that is
`optax.contrib.schedule_free`, whose own weights are those of its gradients alone
(Defazio et al., arXiv:2405.15682). Evaluation, generation and export take the first of
`ema`, `schedule_free` and `raw` that there is, unless one is named.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import optax
from optax import contrib

from zjax.errors import ConfigError, PlanError, Problem
from zjax.sharding.placement import unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.state import TrainState
from zjax.typing import Params

Part = Literal["auto", "ema", "schedule_free", "raw"]
"""Weights of a state by name; `auto` is the first of the others that there is."""
PARTS: tuple[Part, ...] = get_args(Part)


def parts_of(state: TrainState) -> tuple[Part, ...]:
    """Lists the weights that a state holds, those of evaluation first.

    Args:
        state: Arrays or anything in their place.

    Returns:
        Names, `raw` the last of them.
    """
    ema: tuple[Part, ...] = () if state.ema == () else ("ema",)
    free: tuple[Part, ...] = ("schedule_free",) if _schedule_free(state) else ()
    return (*ema, *free, "raw")


def choose_part(part: str, parts: tuple[Part, ...]) -> Part:
    """Resolves `auto`, and refuses weights that are not there.

    Args:
        part: As the user names it.
        parts: Those that there are.

    Raises:
        ConfigError: They are not there.

    Example:
        >>> choose_part("auto", ("ema", "raw"))
        'ema'
    """
    if part == "auto":
        return parts[0]
    for known in parts:
        if known == part:
            return known
    remedy = f"use auto, or one of {', '.join(parts)}"
    raise ConfigError(Problem("part", part, "is not kept in this run", remedy))


def with_part(state: TrainState, part: str) -> TrainState:
    """Leaves one kind of weights in a state, for what only reads it.

    Args:
        state: Of the run; not consumed.
        part: `auto`, or one of `parts_of(state)`.

    Returns:
        A state whose evaluation takes that part.

    Raises:
        ConfigError: The state does not hold it.
    """
    parts = parts_of(state)
    part = choose_part(part, parts)
    if part == "raw":
        return dataclasses.replace(state, ema=(), opt_state=())
    return state if part == parts[0] else dataclasses.replace(state, ema=())


def only_weights(state: TrainState) -> TrainState:
    """Leaves out all that the weights of evaluation are not made of.

    Args:
        state: Of the run; not consumed.
    """
    made_of = {"ema": ("ema",), "schedule_free": ("master", "opt_state")}
    kept = made_of.get(parts_of(state)[0], ("master",))
    names = (field.name for field in dataclasses.fields(state))
    return dataclasses.replace(state, **{n: () for n in names if n not in kept})


def averaged(state: TrainState, plan: Plan) -> Params | None:
    """The averaged weights of a state, traced by `jit`.

    Args:
        state: On the devices.
        plan: Places its arrays.

    Returns:
        Arrays in their logical shapes; None where the state holds none.
    """
    if state.ema != ():
        return unpad_tree(state.ema, plan.ema)
    if not _schedule_free(state):
        return None
    params = unpad_tree(state.master, plan.master)
    opt_state = unpad_tree(state.opt_state, plan.opt_state)
    for found in _schedule_free(dataclasses.replace(state, opt_state=opt_state)):
        params = _of_group(found, params)
    return params


def check_average(state: TrainState, plan: Plan) -> None:
    """Refuses to evaluate weights that rest elsewhere in parts.

    Args:
        state: Of the run.
        plan: Says where its arrays rest.

    Raises:
        PlanError: The average of `schedule_free` would be made from arrays that are not
            on the devices.
    """
    if plan.is_offloaded and state.ema == () and _schedule_free(state):
        problem = "has averaged weights whose parts rest elsewhere"
        remedy = "use zero.optimizer_memory='device', or part='raw'"
        raise PlanError(Problem("tx", "schedule_free", problem, remedy))


def _schedule_free(state: TrainState) -> list[contrib.ScheduleFreeState]:
    found = jax.tree.leaves(state.opt_state, is_leaf=_is_schedule_free)
    return [leaf for leaf in found if _is_schedule_free(leaf)]


def _is_schedule_free(x: Any) -> bool:
    return isinstance(x, contrib.ScheduleFreeState)


def _of_group(state: contrib.ScheduleFreeState, params: Params) -> Params:
    """Averages the parameters that one transformation updates; keeps the others."""
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
