"""Parts of optimizers: clipping, averages, Nesterov momentum and trust ratios."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


def global_norm(tree: Any) -> Float[Array, ""]:
    """Euclidean norm of all elements of a tree of floating arrays, summed in float32.

    Infinite if the sum of squares overflows, even if every element is finite.
    """
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(functools.reduce(jnp.add, squares, jnp.float32(0)))


def clip_by_norm(tree: Any, norm: Float[Array, ""], max_norm: float) -> Any:
    """Divides a tree by `max(1, (norm + 1e-6) / max_norm)`, keeping dtypes.

    `norm` is the global norm of the tree. A `max_norm` of `inf` changes nothing.

    Reference:
        Pascanu et al., arXiv:1211.5063.
    """
    if max_norm == math.inf:
        return tree
    divisor = jnp.maximum(1, (norm + 1e-6) / max_norm)
    return jax.tree.map(lambda leaf: (leaf / divisor).astype(leaf.dtype), tree)


def update_ema(ema: Any, params: Any, decay: float, step: Int[Array, ""]) -> Any:
    """Moves the average towards the parameters by `1 - decay`, in the dtypes of `ema`.

    `decay` is 0 or more and below 1, and limited to `(1 + step) / (10 + step)`, so that
    the initial parameters do not dominate a short run; `step` counts the steps applied
    before. Store the average in float32: in bfloat16 a step of `1 - decay` below 1/256
    is lost in rounding.

    Reference:
        Polyak and Juditsky, 1992, doi:10.1137/0330046; the ramp of the decay is that
        of TensorFlow's ExponentialMovingAverage.
    """
    step = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + step) / (10 + step))

    def moved(
        average: Float[Array, "..."], target: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        wide = average.astype(jnp.float32)
        wide += rate * (target.astype(jnp.float32) - wide)
        return wide.astype(average.dtype)

    return jax.tree.map(moved, ema, params)


def nesterov(
    params: Any, momentum: Any, grads: Any, learning_rate: float, decay: float
) -> tuple[Any, Any]:
    """Takes one step with Nesterov momentum; returns the parameters and the momentum.

    `momentum` is the decayed sum of earlier gradients, zeros at first.

    Reference:
        DiLoCo, arXiv:2311.08105, algorithm 1; Sutskever et al., 2013.
    """
    momentum = jax.tree.map(lambda m, g: decay * m + g, momentum, grads)
    # The look-ahead of Nesterov: the new momentum counts once more.
    moved = jax.tree.map(
        lambda p, m, g: p - learning_rate * (g + decay * m), params, momentum, grads
    )
    return moved, momentum


MIN_RATIO, MAX_RATIO = 0.01, 10.0
"""Limits of the trust ratio, as in DeepSpeed; optax has none."""


def scale_by_layer(
    num_stacked: Callable[[Any], int],
) -> optax.GradientTransformation:
    """Multiplies each update by `norm(params) / norm(update)`, from 0.01 to 10.

    The ratio is 1 if either norm is 0. `num_stacked` gives the number of leading
    stacking dims of a tree path.

    Reference:
        You et al., arXiv:1904.00962, algorithm 2.
    """

    def scaled(
        keys: Any, update: Float[Array, "..."], param: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        dims = tuple(range(num_stacked(keys), update.ndim))
        ratio = ratio_of_norms(layer_norm(param, dims), layer_norm(update, dims))
        return (update * ratio).astype(update.dtype)

    def scale_tree(updates: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(scaled, updates, params)

    return optax.stateless(scale_tree)


def ratio_of_norms(
    param_norm: Float[Array, "..."], update_norm: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Computes the clipped trust ratios of layers."""
    known = (update_norm > 0) & (param_norm > 0)
    # The inner `where` keeps the division finite where a norm is 0.
    ratio = param_norm / jnp.where(known, update_norm, 1)
    return jnp.where(known, jnp.clip(ratio, MIN_RATIO, MAX_RATIO), 1)


def layer_norm(x: Float[Array, "..."], dims: tuple[int, ...]) -> Float[Array, "..."]:
    """Computes the norm of each layer of an array in float32, keeping reduced dims."""
    squares = jnp.square(x.astype(jnp.float32))
    return jnp.sqrt(jnp.sum(squares, axis=dims, keepdims=True))
