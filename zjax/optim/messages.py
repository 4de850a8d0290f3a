"""What replicas send in place of gradients, from the moments of an optimizer state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from zjax.optim.onebit import AdamSteps, make_adam_steps
from zjax.optim.zero_one_adam import ZeroOneAdamState
from zjax.schedule.exchange import Phase
from zjax.settings.schema import Compressed, Rule


def make_message(rule: Rule, phase: Phase) -> Callable[[Any, Any], Any] | None:
    """Returns `message(grads, opt_state)`, the tree that replicas average in a phase.

    Returns None where replicas average gradients.
    """
    if phase.message != "steps":
        return None
    assert isinstance(rule, Compressed)
    return functools.partial(next_steps, steps=make_adam_steps(rule))


def next_steps(grads: Any, opt_state: Any, steps: AdamSteps) -> Any:
    """Returns the steps that one replica would take with its gradients."""
    state = adam_state(opt_state)
    momentum = optax.tree_utils.tree_update_moment(grads, state.mu, steps.b1, 1)
    if isinstance(state, ZeroOneAdamState):
        counts = optax.safe_increment(state.steps), state.variances
    else:
        # The bias correction stays at the freeze, as the second moments do.
        counts = state.count, state.count
    return steps.of_momentum(momentum, state.nu, *counts)


def adam_state(opt_state: Any) -> Any:
    """Finds the moments in the state of a rule that compresses messages."""
    # The state may sit inside a chain or a partition.
    leaves = jax.tree.leaves(opt_state, is_leaf=_has_moments)
    (state,) = filter(_has_moments, leaves)
    return state


def _has_moments(state: Any) -> bool:
    return isinstance(state, ZeroOneAdamState | optax.ScaleByAdamState)
