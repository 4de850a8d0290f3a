"""1-bit Adam: Adam whose replicas send momentum in one bit per number.

Tang et al., arXiv:2102.02888. In the warm-up gradients are averaged as usual. Then the
second moments are kept as they are, each replica adds its own gradient to the momentum,
and the momentum is averaged. Without bias correction, as in the reference
implementation: a correction of the second moments would have to be kept, too.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.config.schema import Config

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
    """The momentum with the gradients of one replica, which it sends.

    Args:
        grads: Gradients of the replica.
        opt_state: State of an optimizer with `scale_by_onebit_adam`.
        b1: Decay of the momentum, 0 or more and less than 1.

    Example:
        >>> tx = scale_by_onebit_adam(0.9, 0.999, 1e-8)
        >>> state = tx.init(jnp.zeros(2))
        >>> next_momentum(jnp.array([1.0, 2.0]), state, 0.5).tolist()
        [0.5, 1.0]
    """
    momentum = optax.tree_utils.tree_get(opt_state, "mu")
    return optax.tree_utils.tree_update_moment(grads, momentum, b1, 1)


def scale_by_onebit_adam(
    b1: float, b2: float, eps: float
) -> optax.GradientTransformationExtraArgs:
    """Scales by the second moments; `update` takes `phase=`.

    In `COMPRESSED` its updates are the mean momentum of all replicas. Elements that had
    no gradient in the warm-up do not move, as one bit cannot say 0.

    Args:
        b1: Decay of the momentum, 0 or more and less than 1.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Added to the root of the second moments, above 0.

    Returns:
        A transformation with the state of `optax.scale_by_adam`.

    Example:
        >>> tx = scale_by_onebit_adam(0.0, 0.75, 1e-8)
        >>> grads = jnp.array([4.0, 0.0])
        >>> updates, _ = tx.update(grads, tx.init(grads), phase=WARM_UP)
        >>> updates.tolist()
        [2.0, 0.0]

    Reference:
        1-bit Adam, arXiv:2102.02888, algorithm 1.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del params, extra
        if phase == COMPRESSED:
            second = state.nu
            momentum = jax.tree.map(
                lambda m, v: jnp.where(v > 0, m, 0), updates, second
            )
        else:
            momentum = optax.tree_utils.tree_update_moment(updates, state.mu, b1, 1)
            second = optax.tree_utils.tree_update_moment(updates, state.nu, b2, 2)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), momentum, second)
        count = optax.safe_increment(state.count)
        return scaled, optax.ScaleByAdamState(count, momentum, second)

    return optax.GradientTransformationExtraArgs(init, update)
