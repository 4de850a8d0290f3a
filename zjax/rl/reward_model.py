"""Losses of a model that gives a completion a reward, from preferences."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.rl.masks import masked
from zjax.rl.ranges import check_not_negative


def bradley_terry_loss(
    chosen: Float[Array, " P"],
    rejected: Float[Array, " P"],
    mask: Bool[Array, " P"],
    *,
    margins: Float[Array, " P"] | None = None,
    centering: float = 0.0,
) -> Float[Array, " P"]:
    """Computes `-log sigmoid(r_c - r_j - m) + centering (r_c + r_j)^2`.

    Args:
        chosen: Reward r_c of the preferred completion of each pair.
        rejected: Reward r_j of the rejected completion of each pair.
        mask: Pairs that count; others give 0, and get no gradient, whatever the values.
        margins: Gap m that each pair is to have; not differentiated. None is 0.
        centering: Weight of the square that keeps the mean reward near 0, 0 or more.

    Returns:
        Loss of each pair, 0 or more, in float32; float64 from float64.

    Raises:
        ConfigError: `centering` is below 0.

    Example:
        >>> chosen, rejected = jnp.array([[1.5], [0.5]])
        >>> mask = jnp.array([True])
        >>> f"{bradley_terry_loss(chosen, rejected, mask)[0]:.4f}"
        '0.3133'
        >>> f"{bradley_terry_loss(chosen, rejected, mask, centering=0.1)[0]:.4f}"
        '0.7133'

    Reference:
        Ouyang et al., InstructGPT (arXiv:2203.02155, equation 1), for lists of two;
        margin: Touvron et al., Llama 2 (arXiv:2307.09288, equation 2); centering:
        Eisenstein et al. (arXiv:2312.09244).
    """
    check_not_negative(centering=centering)
    chosen, rejected = (masked(x, mask) for x in (chosen, rejected))
    gaps = chosen - rejected
    if margins is not None:
        gaps -= jax.lax.stop_gradient(masked(margins, mask))
    losses = centering * jnp.square(chosen + rejected) - jax.nn.log_sigmoid(gaps)
    return jnp.where(mask, losses, 0)


def ranking_loss(
    rewards: Float[Array, "P K"],
    mask: Bool[Array, "P K"],
    *,
    centering: float = 0.0,
) -> Float[Array, " P"]:
    """Averages `bradley_terry_loss` over all pairs of each ranked list.

    Pairs of one list share a prompt: as one example they weigh as one, however many.

    Args:
        rewards: Rewards of the completions of each prompt, best first.
        mask: Completions that count; others may lie anywhere in a list, and reach
            neither value nor gradient.
        centering: Weight of the squares that keep the mean reward near 0, 0 or more.

    Returns:
        Loss of each list, 0 or more, in float32; float64 from float64. A list of fewer
        than two completions gives 0: `mask.sum(1) > 1` marks the lists that count.

    Raises:
        ConfigError: `centering` is below 0.

    Example:
        >>> rewards = jnp.array([[2.0, 1.0, jnp.nan], [2.0, 1.0, 1.0]])
        >>> mask = jnp.array([[True, True, False], [True, True, True]])
        >>> [f"{x:.4f}" for x in ranking_loss(rewards, mask)]
        ['0.3133', '0.4399']

    Reference:
        Ouyang et al., InstructGPT (arXiv:2203.02155, equation 1).
    """
    better, worse = jnp.triu_indices(rewards.shape[1], k=1)
    is_pair = mask[:, better] & mask[:, worse]
    losses = bradley_terry_loss(
        rewards[:, better].reshape(-1),
        rewards[:, worse].reshape(-1),
        is_pair.reshape(-1),
        centering=centering,
    )
    return losses.reshape(is_pair.shape).sum(1) / jnp.maximum(is_pair.sum(1), 1)
