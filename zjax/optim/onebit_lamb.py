"""1-bit LAMB: LAMB whose replicas send momentum in one bit per number.

Li et al., arXiv:2104.06069. As in 1-bit Adam the second moments are kept after the
warm-up, and so is the mean trust ratio of each layer. A factor follows how far fresh
second moments, of gradients recovered from the momentum, have gone from the kept ones.
Layers are scaled to one magnitude before their signs are taken.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.onebit_adam import COMPRESSED, WARM_UP, next_momentum
from zjax.optim.trust_ratio import layer_norm, ratio_of_layer

RATIO_DECAY = 0.9
MIN_FACTOR, MAX_FACTOR, FACTOR_CHANGE = 0.5, 4.0, 0.1
"""Limits of the factor, and of its change from one step to the next, of DeepSpeed."""


class OnebitLambState(NamedTuple):
    """The state of `scale_by_onebit_lamb`; `ratio` to `scaling` hold one per layer.

    Args:
        mu: Momentum.
        nu: Second moments, which the warm-up leaves.
        fresh: Second moments that go on.
        ratio: Mean trust ratio of the warm-up.
        factor: What the trust ratio was multiplied by in the last step.
        scaling: What a message is multiplied by.
    """

    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any
    scaling: Any


def scaled_momentum(grads: Any, opt_state: Any, b1: float) -> Any:
    """The momentum with the gradients of one replica, all layers of one magnitude.

    Args:
        grads: Gradients of the replica.
        opt_state: State of an optimizer with `scale_by_onebit_lamb`.
        b1: Decay of the momentum, 0 or more and less than 1.
    """
    scaling = optax.tree_utils.tree_get(opt_state, "scaling")
    return jax.tree.map(jnp.multiply, next_momentum(grads, opt_state, b1), scaling)


def scale_by_onebit_lamb(
    b1: float,
    b2: float,
    eps: float,
    decay_of: Callable[[Any], Any],
    num_stacked: Callable[[Any], int],
) -> optax.GradientTransformationExtraArgs:
    """LAMB without the learning rate; `update` takes `phase=`.

    In `COMPRESSED` its updates are the mean of `scaled_momentum` over all replicas.

    Args:
        b1: Decay of the momentum, 0 or more and less than 1.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Added to the root of the second moments, above 0.
        decay_of: Weight decay by parameter, a tree of numbers, of the parameters.
        num_stacked: Leading stacking dims of a tree path.

    Returns:
        A transformation of `OnebitLambState`.

    Example:
        >>> tx = scale_by_onebit_lamb(0.0, 0.75, 1e-8, lambda p: 0.0, lambda keys: 0)
        >>> params = jnp.array([3.0, 4.0])
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> [round(float(x), 3) for x in updates]
        [3.536, 3.536]

    Reference:
        1-bit LAMB, arXiv:2104.06069, algorithm 1.
    """

    def by_layer(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
        def call(keys: Any, x: Any, *more: Any) -> Any:
            return function(tuple(range(num_stacked(keys), x.ndim)), x, *more)

        return jax.tree_util.tree_map_with_path(call, tree, *others)

    def init(params: Any) -> OnebitLambState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        none = by_layer(lambda dims, x: jnp.sum(x * 0.0, dims, keepdims=True), params)
        one = jax.tree.map(lambda x: x + 1, none)
        return OnebitLambState(zeros, zeros, zeros, none, one, one)

    def warm_up(grads: Any, state: Any, params: Any) -> tuple[Any, OnebitLambState]:
        mu = optax.tree_utils.tree_update_moment(grads, state.mu, b1, 1)
        nu = optax.tree_utils.tree_update_moment(grads, state.nu, b2, 2)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        decayed = _decayed(scaled, params, decay_of)
        ratios = by_layer(ratio_of_layer, decayed, params)
        mean = jax.tree.map(_mean_ratio, state.ratio, ratios)
        return jax.tree.map(jnp.multiply, decayed, ratios), state._replace(
            mu=mu,
            nu=nu,
            fresh=nu,
            ratio=mean,
            scaling=_scaling(by_layer(_root_mean_square, mu)),
        )

    def compressed(sent: Any, state: Any, params: Any) -> tuple[Any, OnebitLambState]:
        mu = jax.tree.map(
            lambda x, s, v: jnp.where(v > 0, x / s, 0), sent, state.scaling, state.nu
        )
        grads = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, state.mu)
        fresh = optax.tree_utils.tree_update_moment(grads, state.fresh, b2, 2)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, state.nu)
        decayed = _decayed(scaled, params, decay_of)
        new_factor = functools.partial(_factor, eps=eps)
        factor = by_layer(new_factor, scaled, decayed, state.nu, fresh, state.factor)
        updates = jax.tree.map(lambda u, r, f: u * r * f, decayed, state.ratio, factor)
        return updates, state._replace(mu=mu, fresh=fresh, factor=factor)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, OnebitLambState]:
        del extra
        step = compressed if phase == COMPRESSED else warm_up
        return step(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _decayed(updates: Any, params: Any, decay_of: Callable[[Any], Any]) -> Any:
    return jax.tree.map(lambda u, p, d: u + d * p, updates, params, decay_of(params))


def _mean_ratio(mean: jax.Array, ratio: jax.Array) -> jax.Array:
    """A ratio of 1 is that of parameters without a norm, and does not count."""
    return jnp.where(ratio == 1, mean, RATIO_DECAY * mean + (1 - RATIO_DECAY) * ratio)


def _root_mean_square(dims: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _scaling(sizes: Any) -> Any:
    """The mean size of all layers over that of each; 1 for one without a size."""
    leaves = jax.tree.leaves(sizes)
    count = sum(x.size for x in leaves)
    mean = functools.reduce(jnp.add, [x.sum() for x in leaves]) / count
    return jax.tree.map(
        lambda x: jnp.where(x > 0, mean / jnp.where(x > 0, x, 1), 1), sizes
    )


def _factor(
    dims: tuple[int, ...],
    scaled: jax.Array,
    decayed: jax.Array,
    kept: jax.Array,
    fresh: jax.Array,
    last: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """How much larger steps may be with the fresh second moments of a layer."""
    quotients = (jnp.sqrt(kept) + eps) / (jnp.sqrt(fresh) + eps)
    factor = jnp.max(quotients, axis=dims, keepdims=True)
    norm = layer_norm(decayed, dims)
    share = layer_norm(scaled, dims) / jnp.where(norm > 0, norm, 1)
    share = jnp.where(norm > 0, jnp.minimum(share, 1), 1)
    factor = jnp.clip(factor * share + 1 - share, MIN_FACTOR, MAX_FACTOR)
    return jnp.clip(factor, last * (1 - FACTOR_CHANGE), last * (1 + FACTOR_CHANGE))
