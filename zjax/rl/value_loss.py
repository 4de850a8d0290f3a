"""The loss of a critic, whose predictions may move by a bounded step per update."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl.masks import masked


def value_loss(
    values: Float[Array, "B L"],
    old_values: Float[Array, "B L"],
    returns: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
    *,
    clip: float = 0.2,
) -> Float[Array, "B L"]:
    """Computes half the squared error of values, with PPO's clip around old values.

    The loss is `max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2) / 2`.

    Args:
        values: Value of each token by the critic.
        old_values: Value of each token before the first update on the batch.
        returns: Targets, from `gae`; not differentiated.
        mask: True for the tokens to learn from.
        clip: Distance from the old value, above 0, beyond which a value that moves
            towards the return has no gradient; `math.inf` does not clip.

    Returns:
        The loss of each token; 0 outside the mask.

    Raises:
        ConfigError: If `clip` is not above 0.

    Example:
        >>> values, old_values = jnp.array([[1.0]]), jnp.array([[0.0]])
        >>> returns, mask = jnp.array([[1.0]]), jnp.array([[True]])
        >>> value_loss(values, old_values, returns, mask, clip=0.5).tolist()
        [[0.125]]

    Reference:
        Engstrom et al., Implementation Matters (arXiv:2005.12729), section 3.
    """
    check_clip(clip)
    values = masked(values, mask)
    old_values, returns = (
        jax.lax.stop_gradient(masked(x, mask)) for x in (old_values, returns)
    )
    clipped = jnp.clip(values, old_values - clip, old_values + clip)
    errors = jnp.square(values - returns), jnp.square(clipped - returns)
    return jnp.maximum(*errors) / 2


def check_clip(clip: float) -> None:
    """Refuses a distance from the old value that is not above 0."""
    if not clip > 0:
        remedy = "use 0.2, or math.inf for no clip"
        raise ConfigError(Problem("clip", clip, "is not above 0", remedy))
