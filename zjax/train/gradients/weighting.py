"""Losses and gradients of microbatches, averaged by their weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import ModelError, Problem
from zjax.typing import Batch, Loss, ModelState, Params

OWN_METRICS = frozenset(
    "loss weight grad_norm skipped_steps learning_rate loss_scale loss_scale_spent "
    "step step_seconds tokens_per_second consumed_tokens mfu mfu_full_attention".split()
)
"""Names that a run gives to numbers of its own."""


def check_names(loss: Loss) -> Loss:
    """Refuses metrics that would be overwritten, or overwrite others.

    Args:
        loss: Of a microbatch.

    Returns:
        The same.

    Raises:
        ModelError: Names every such metric.
    """
    problem, remedy = "has a name of the run's own", "give it another name"
    problems = [
        Problem(f"metrics/{name}", str(x.dtype), problem, remedy)
        for name, x in sorted(loss.metrics.items())
        if name in OWN_METRICS
    ]
    if problems:
        raise ModelError(*problems)
    return loss


def mean_loss(losses: Loss, model_state: ModelState) -> Loss:
    """Weighted mean of stacked microbatch losses.

    Args:
        losses: Loss whose leaves are stacked [N].
        model_state: The state after the last microbatch.

    Returns:
        One loss; 0 where all weights are 0.
    """
    total = jnp.sum(losses.weight)
    shares = losses.weight / jnp.where(total == 0, 1, total)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(shares * jnp.where(shares == 0, 0, x))

    metrics = jax.tree.map(mean, losses.metrics)
    return Loss(mean(losses.value), total, model_state, metrics)


def counted(weight: jax.Array) -> jax.Array:
    """What a loss counts alone, whatever its weight beside others.

    Args:
        weight: float32[], of the loss; not differentiated.

    Returns:
        1, or 0 where there is no weight, or NaN where it is no finite number.

    Example:
        >>> [float(counted(jnp.float32(x))) for x in (0.0, 0.3, jnp.inf)]
        [0.0, 1.0, nan]
    """
    weight = jax.lax.stop_gradient(weight)
    is_none = weight == 0
    return jnp.where(is_none, 0, weight / jnp.where(is_none, 1, weight))


def accumulate(
    one: Callable[..., tuple[Params, Loss]],
    zeros: Params,
    state: ModelState,
    parts: Batch,
    key: jax.Array,
    *,
    pin: Callable[[Params], Params] = lambda total: total,
) -> tuple[Params, Loss]:
    """Averages gradients over microbatches that follow one another, by weight.

    Args:
        one: `one(model_state, microbatch, key) -> (grads, loss)`, gradients of a mean.
        zeros: The sum at its start, in its dtype and place.
        state: The model state before the first microbatch.
        parts: Microbatches, stacked.
        key: Folded with the number of each microbatch.
        pin: Holds the sum in its place.

    Returns:
        Gradients of the mean over all microbatches, in the dtype of `zeros`.
    """
    num_microbatches = jax.tree.leaves(parts)[0].shape[0]
    if num_microbatches == 1:
        first = jax.tree.map(lambda x: x[0], parts)
        grads, loss = one(state, first, jax.random.fold_in(key, 0))
        alone = jax.tree.map(
            lambda x: x[None], check_names(loss)._replace(model_state=())
        )
        return grads, mean_loss(alone, loss.model_state)

    def add(carry: Any, inputs: Any) -> Any:
        total, state = carry
        index, microbatch = inputs
        grads, result = one(state, microbatch, jax.random.fold_in(key, index))
        check_names(result)
        total = jax.tree.map(lambda t, g: t + scaled(g, result.weight), total, grads)
        return (pin(total), result.model_state), result._replace(model_state=())

    inputs = (jnp.arange(num_microbatches), parts)
    (total, state), losses = jax.lax.scan(add, (pin(zeros), state), inputs)
    result = mean_loss(losses, state)
    inverse = 1 / jnp.where(result.weight == 0, 1, result.weight)
    return jax.tree.map(lambda t: scaled(t, inverse), total), result


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Scales an array; a factor of 0 gives 0, even where `x` is 0 / 0.

    Args:
        x: Any floating dtype.
        factor: float32[], which the dtype of `x` need not hold.

    Returns:
        The product in the dtype of `x`.

    Example:
        >>> float(scaled(jnp.float32(jnp.nan), jnp.float32(0)))
        0.0
        >>> float(scaled(jnp.float16(0.25), jnp.float32(131072)))
        32768.0
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.where(factor == 0, 0, (x.astype(wide) * factor).astype(x.dtype))


def unit_of(weights: jax.Array) -> jax.Array:
    """What the weights of microbatches are counted in.

    Args:
        weights: float32[microbatches], 0 or more.

    Returns:
        float32[]: the largest, so that gradients become no larger, and those of
        microbatches that are worth the same are added as they are; 1 where that is 0.

    Example:
        >>> [float(unit_of(jnp.array(weights))) for weights in ([3.0, 5.0], [0.0, 0.0])]
        [5.0, 1.0]
    """
    largest = jnp.max(weights)
    return jnp.where(largest > 0, largest, 1)
