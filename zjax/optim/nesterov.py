"""Nesterov momentum on outer gradients, the outer optimizer of DiLoCo."""

from typing import Any

import jax


def nesterov(
    params: Any, momentum: Any, grads: Any, learning_rate: float, decay: float
) -> tuple[Any, Any]:
    """Takes one step.

    Args:
        params: Arrays to move.
        momentum: Decayed sum of earlier gradients; zeros at first.
        grads: Gradients.
        learning_rate: Above 0.
        decay: Decay of the momentum, 0 or more and less than 1.

    Returns:
        The moved arrays and the momentum.

    Example:
        >>> nesterov(1.0, 0.0, 1.0, learning_rate=0.5, decay=0.0)
        (0.5, 1.0)

    Reference:
        DiLoCo, arXiv:2311.08105, algorithm 1; Sutskever et al., 2013.
    """
    momentum = jax.tree.map(lambda m, g: decay * m + g, momentum, grads)
    moved = jax.tree.map(
        lambda p, m, g: p - learning_rate * (g + decay * m), params, momentum, grads
    )
    return moved, momentum
