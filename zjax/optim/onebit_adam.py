"""1-bit Adam: Adam whose replicas send momentum in one bit per number.

Tang et al., arXiv:2102.02888. The warm-up is Adam. Then the second moments are kept as
they are, each replica adds its own gradient to the momentum, and the momentum is
averaged. The bias corrections are kept, too; the reference implementation has none, so
that after a warm-up of few steps it would keep second moments that are too small.
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
        A transformation with the state of `optax.scale_by_adam`, whose count is that of
        the warm-up.

    Example:
        >>> tx = scale_by_onebit_adam(0.0, 0.75, 1e-8)
        >>> grads = jnp.array([4.0, 0.0])
        >>> updates, _ = tx.update(grads, tx.init(grads), phase=WARM_UP)
        >>> updates.tolist()
        [1.0, 0.0]

    Reference:
        1-bit Adam, arXiv:2102.02888, algorithm 1.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

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
        momentum = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0), updates, state.nu)
        return corrected(momentum, state), state._replace(mu=momentum)

    def corrected(momentum: Any, state: Any) -> Any:
        first, second = 1 - b1**state.count, 1 - b2**state.count
        return jax.tree.map(
            lambda m, v: m / first / (jnp.sqrt(v / second) + eps), momentum, state.nu
        )

    return optax.GradientTransformationExtraArgs(adam.init, update)
