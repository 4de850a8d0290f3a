"""What a state holds so that replicas can send each other less."""

from typing import Any

from zjax.config.schema import Config
from zjax.optim.rounds import make_rounds
from zjax.sharding.plan import Plan
from zjax.train.state import state_rows


def kept_rows(plan: Plan, config: Config) -> dict[str, Any]:
    """The plans of what a state holds besides its weights and their moments.

    Args:
        plan: The plan of a run.
        config: Settings; read for `communication` and `optimizer`.

    Returns:
        Trees of `ArrayPlan` by name; empty ones for what the run does not keep.
    """
    state = state_rows(plan, config)
    if make_rounds(config) is None:
        return {"errors of the codec": state.extra}
    return {
        "anchor": state.master,
        "outer momentum": state.extra.momentum,
        "errors of the codec": state.extra.errors,
        "means on their way": state.extra.arriving,
    }
