"""1-bit Adam: Adam whose replicas send their steps in one bit per number.

Tang et al., arXiv:2102.02888. The warm-up is Adam. Then the second moments are kept as
they are, each replica adds its own gradient to the momentum, and the momentum is
averaged, in units of the step: a bit then loses as much of one parameter as of another.
The bias corrections are kept, too; `optimizer.bias_correction=False` leaves them out,
as DeepSpeed does. DeepSpeed also sends the momentum itself and does not bound the
steps, which takes a long warm-up.
"""

import math
from typing import Any

import optax

from zjax.config.schema import Config
from zjax.optim.adam_steps import AdamSteps, scale_by_adam, where_known

WARM_UP, COMPRESSED = "warm_up", "compressed"
_SHARE = 0.15


def freeze_step(config: Config) -> int:
    """The last step of the warm-up.

    Args:
        config: Read for `optimizer.freeze_step` and `num_steps`.

    Example:
        >>> freeze_step(Config(num_steps=1000))
        150
    """
    return config.optimizer.freeze_step or math.ceil(_SHARE * config.num_steps)


def next_momentum(grads: Any, opt_state: Any, b1: float) -> Any:
    """The momentum with the gradients of one replica.

    Args:
        grads: Gradients of the replica.
        opt_state: State of an optimizer with momentum.
        b1: Decay of the momentum, 0 or more and less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_onebit_adam(AdamSteps(0.9, 0.999, 1e-8))
        >>> state = tx.init(jnp.zeros(2))
        >>> next_momentum(jnp.array([1.0, 2.0]), state, 0.5).tolist()
        [0.5, 1.0]
    """
    momentum = optax.tree_utils.tree_get(opt_state, "mu")
    return optax.tree_utils.tree_update_moment(grads, momentum, b1, 1)


def next_steps(grads: Any, opt_state: Any, steps: AdamSteps) -> Any:
    """The steps that one replica would take, which it sends.

    Args:
        grads: Gradients of the replica.
        opt_state: State of an optimizer with `scale_by_onebit_adam`.
        steps: Those of the optimizer.
    """
    second, count = (
        optax.tree_utils.tree_get(opt_state, name, filtering=is_of_adam)
        for name in ("nu", "count")
    )
    momentum = next_momentum(grads, opt_state, steps.b1)
    return steps.of_momentum(momentum, second, count, count)


def is_of_adam(path: Any, _: Any) -> bool:
    """Whether a leaf of the state is one of Adam's, not a count of the schedule."""
    return getattr(path[-1], "tuple_name", "") == "ScaleByAdamState"


def scale_by_onebit_adam(
    steps: AdamSteps,
) -> optax.GradientTransformationExtraArgs:
    """Scales by the second moments; `update` takes `phase=`.

    In `COMPRESSED` its updates are the mean steps of all replicas. Elements that had no
    gradient in the warm-up do not move, as one bit cannot say 0.

    Args:
        steps: Decays of the moments, and steps by moments that are kept.

    Returns:
        A transformation with the state of `optax.scale_by_adam`, whose count is that of
        the warm-up.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_onebit_adam(AdamSteps(0.0, 0.75, 1e-8))
        >>> grads = jnp.array([4.0, 0.0])
        >>> updates, _ = tx.update(grads, tx.init(grads), phase=WARM_UP)
        >>> updates.tolist()
        [1.0, 0.0]

    Reference:
        1-bit Adam, arXiv:2102.02888, algorithm 1.
    """
    adam = scale_by_adam(steps)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del extra
        if phase != COMPRESSED:
            return adam.update(updates, state, params)
        momentum = steps.momentum_of(updates, state.nu, state.count, state.count)
        updates = where_known(updates, state.nu)
        return updates, state._replace(mu=momentum)

    return optax.GradientTransformationExtraArgs(adam.init, update)
