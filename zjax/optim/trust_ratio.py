"""The layer-wise trust ratio of LAMB.

You et al., arXiv:1904.00962, with the limits of DeepSpeed. Unlike optax's, it has
limits, and a ratio for each layer of a stacked array.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

MIN_RATIO, MAX_RATIO = 0.01, 10.0


def scale_by_layer(
    num_stacked: Callable[[Any], int],
) -> optax.GradientTransformation:
    """Multiplies each update by `norm(params) / norm(update)`, from 0.01 to 10.

    The ratio is 1 where either norm is 0. `num_stacked` gives the number of leading
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
    """The trust ratios of layers."""
    known = (update_norm > 0) & (param_norm > 0)
    ratio = param_norm / jnp.where(known, update_norm, 1)
    return jnp.where(known, jnp.clip(ratio, MIN_RATIO, MAX_RATIO), 1)


def layer_norm(x: Float[Array, "..."], dims: tuple[int, ...]) -> Float[Array, "..."]:
    """The norms of the layers of an array in float32, of one element per layer."""
    squares = jnp.square(x.astype(jnp.float32))
    return jnp.sqrt(jnp.sum(squares, axis=dims, keepdims=True))
