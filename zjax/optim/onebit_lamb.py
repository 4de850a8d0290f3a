"""The trust ratios of 1-bit LAMB, which is 1-bit Adam but for them.

Li et al., arXiv:2104.06069. The norms of steps that were sent in one bit are mostly
those of what the bits lose, so that ratios with them make steps too short. The mean
norms of the warm-up are kept instead, as the paper keeps mean ratios, and the norms of
the parameters go on. No message is needed: replicas have the same parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.onebit_adam import COMPRESSED, WARM_UP
from zjax.optim.trust_ratio import layer_norm, ratio_of_norms

DECAY = 0.9


class KeptNorms(NamedTuple):
    """The state of `scale_by_kept_norm`.

    Args:
        norm: Mean norms of the steps of the warm-up, one for each layer.
    """

    norm: Any


def scale_by_kept_norm(
    num_stacked: Callable[[Any], int],
) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by the trust ratio of its layer; `update` takes `phase=`.

    Args:
        num_stacked: Leading stacking dims of a tree path.

    Returns:
        A transformation of `KeptNorms`.

    Example:
        >>> tx = scale_by_kept_norm(lambda keys: 0)
        >>> params, step = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
        >>> _, state = tx.update(step, tx.init(params), params)
        >>> tx.update(9 * step, state, params, phase=COMPRESSED)[0].tolist()
        [0.0, 45.0]

    Reference:
        1-bit LAMB, arXiv:2104.06069, section 3.
    """

    def by_layer(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
        def call(keys: Any, x: Any, *more: Any) -> Any:
            return function(tuple(range(num_stacked(keys), x.ndim)), x, *more)

        return jax.tree_util.tree_map_with_path(call, tree, *others)

    def norms_of(tree: Any) -> Any:
        return by_layer(lambda dims, x: layer_norm(x, dims), tree)

    def init(params: Any) -> KeptNorms:
        return KeptNorms(jax.tree.map(jnp.zeros_like, norms_of(params)))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, KeptNorms]:
        del extra
        used = state.norm
        if phase != COMPRESSED:
            used = norms_of(updates)
            state = KeptNorms(jax.tree.map(_mean, state.norm, used))
        ratios = jax.tree.map(ratio_of_norms, norms_of(params), used)
        return jax.tree.map(jnp.multiply, updates, ratios), state

    return optax.GradientTransformationExtraArgs(init, update)


def _mean(mean: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.where(mean == 0, norm, DECAY * mean + (1 - DECAY) * norm)
