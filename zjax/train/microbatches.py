"""Splits a global batch into microbatches, and weighs losses and gradients."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.errors import ModelError, PlanError, Problem
from zjax.sharding.activations import field_of, map_rows, rows_of
from zjax.sharding.naming import path_of
from zjax.stack.forward import named_totals
from zjax.typing import Batch, Loss, Model, ModelState, Params, StepBatch


def split_batch(
    batch: Batch, model: Model, num_microbatches: int, num_shares: int
) -> Batch:
    """Splits a batch [B, ...] into microbatches [N, B / N, ...] without moving rows.

    Each of `num_shares` devices along the batch dim splits local rows into microbatches
    of adjacent rows. For a separable loss, which compares no rows, row i is in
    microbatch i mod N: all meshes then have equal microbatches and equal random
    numbers. Arrays without rows are repeated. Raises PlanError if B does not divide.
    """

    def split(x: jax.Array) -> jax.Array:
        rest = x.shape[1:]
        if model.separable:
            # Neighbouring rows differ in microbatch, so each device keeps rows of every
            # microbatch.
            return x.reshape(-1, num_microbatches, *rest).swapaxes(0, 1)
        x = x.reshape(num_shares, num_microbatches, -1, *rest).swapaxes(0, 1)
        return x.reshape(num_microbatches, -1, *rest)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (num_microbatches, *x.shape))

    check_batch(batch, model, num_microbatches, num_shares)
    return map_rows(split, repeat, batch, model.entries)


def join_rows(microbatches: jax.Array, model: Model, num_shares: int) -> jax.Array:
    """Undoes `split_batch`: microbatches [N, B / N, ...] of rows to rows [B, ...]."""
    rest = microbatches.shape[2:]
    if model.separable:
        return microbatches.swapaxes(0, 1).reshape(-1, *rest)
    x = microbatches.reshape(len(microbatches), num_shares, -1, *rest)
    return x.swapaxes(0, 1).reshape(-1, *rest)


def row_specs(batch: Batch | StepBatch, model: Model, axes: Sequence[str]) -> Any:
    """Returns a tree of PartitionSpec for `shard_map`, with rows split over `axes`."""
    if isinstance(batch, StepBatch):
        everywhere = jax.tree.map(lambda x: P(), batch.dropping)
        return StepBatch(row_specs(batch.batch, model, axes), everywhere)
    return map_rows(lambda x: P(tuple(axes)), lambda x: P(), batch, model.entries)


def check_batch(
    batch: Batch, model: Model, num_microbatches: int, num_shares: int
) -> None:
    """Raises PlanError if rows do not divide over devices and microbatches."""
    parts = num_shares * num_microbatches
    problems = [
        Problem(
            field_of(path),
            leaf.shape,
            f"does not divide over {num_shares} shares of {num_microbatches} "
            "microbatches",
            f"use a multiple of {parts} as its first dim",
        )
        for path, leaf in rows_of(batch, model.entries)
        if leaf.shape[0] % parts
    ]
    if problems:
        raise PlanError(*problems)


def check_lengths(batch: Batch, model: Model, num_shares: int) -> None:
    """Raises PlanError if the second dim does not divide over the sequence axis."""
    problems = [
        Problem(
            field_of(path),
            leaf.shape,
            f"does not divide over mesh.sequence={num_shares}",
            f"use a multiple of {num_shares} as its second dim, or mesh.sequence=1",
        )
        for path, leaf in rows_of(batch, model.entries)
        if leaf.ndim > 1 and leaf.shape[1] % num_shares
    ]
    if problems:
        raise PlanError(*problems)


def cast_batch(batch: Batch, model: Model, dtype: Any) -> Batch:
    """Casts the inputs of a model, but no targets or weights, to the compute dtype."""
    inputs = model.cast or ()

    def cast(keys: Any, x: jax.Array) -> jax.Array:
        return x.astype(dtype) if path_of(keys) in inputs else x

    return jax.tree_util.tree_map_with_path(cast, batch)


OWN_METRICS = frozenset(
    "loss weight grad_norm skipped_steps learning_rate loss_scale loss_scale_spent "
    "sequence_length step step_seconds tokens_per_second consumed_tokens mfu "
    "mfu_full_attention".split()
)
"""Metrics that the run computes itself."""


def check_names(loss: Loss) -> Loss:
    """Returns the loss; raises ModelError if a metric has a name of `OWN_METRICS`."""
    problem, remedy = "has a name of the run's own", "give it another name"
    problems = [
        Problem(f"metrics/{name}", str(x.dtype), problem, remedy)
        for name, x in sorted((loss.metrics | named_totals(loss.totals)).items())
        if name in OWN_METRICS
    ]
    if problems:
        raise ModelError(*problems)
    return loss


def mean_loss(losses: Loss, model_state: ModelState) -> Loss:
    """Averages stacked microbatch losses [N] by weight, and adds up totals.

    The mean is 0 if all weights are 0. `model_state` is the state after the last
    microbatch.
    """
    total = jnp.sum(losses.weight)
    mean = functools.partial(_mean, weights=losses.weight)
    metrics = jax.tree.map(mean, losses.metrics)
    totals = jax.tree.map(_total, losses.totals)
    return Loss(mean(losses.value), total, model_state, metrics, totals)


def mean_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Merges metrics [N, ...] of replicas that stepped apart into metrics of one run.

    The loss and the model's metrics are averaged by weight, weights and integer totals
    are added, and all other metrics of the run are averaged. Takes arrays of JAX or
    NumPy.

    Example:
        >>> found = mean_metrics(
        ...     {
        ...         "loss": jnp.array([1.0, 4.0]),
        ...         "weight": jnp.array([2.0, 1.0]),
        ...         "grad_norm": jnp.array([1.0, 4.0]),
        ...         "load": jnp.array([[1, 2], [3, 4]]),
        ...     }
        ... )
        >>> [found[name].tolist() for name in ("loss", "weight", "grad_norm", "load")]
        [2.0, 3.0, 2.5, [4, 6]]
    """

    def one(name: str, x: Any) -> Any:
        if name == "weight" or not jnp.issubdtype(x.dtype, jnp.floating):
            return _total(x)
        if name in OWN_METRICS and name != "loss":
            return x.mean()
        return _mean(x, metrics["weight"])

    return {name: one(name, x) for name, x in metrics.items()}


def _mean(x: Any, weights: Any) -> Any:
    """Averages by weight; entries of weight 0 may be NaN."""
    # Metrics on the host must not wait for the devices, as operations of JAX do there.
    numpy, total = x.__array_namespace__(), weights.sum()
    shares = weights / numpy.where(total == 0, 1, total)
    return (shares * numpy.where(shares == 0, 0, x)).sum()


def _total(x: Any) -> Any:
    # Without a dtype, NumPy's rules would add int32 up in int64 where that is enabled.
    return x.sum(0, dtype=x.dtype)


def counted(weight: jax.Array) -> jax.Array:
    """Returns 1 for a loss that counts, whatever the weight float32[].

    It is 0 for a weight of 0, NaN for a weight that is not finite, and not
    differentiated.

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
    """Averages gradients over microbatches by weight, one microbatch after another.

    `one(model_state, microbatch, key)` returns the gradients of a mean and the loss.
    `zeros` are the initial sums in their final dtypes and placements, and `pin`
    constrains the placement of sums. A single microbatch's gradients are returned as
    computed.
    """
    num_microbatches = jax.tree.leaves(parts)[0].shape[0]
    if num_microbatches == 1:
        first = jax.tree.map(lambda x: x[0], parts)
        # Fold even for one microbatch: keys match a run with more microbatches.
        grads, loss = one(state, first, jax.random.fold_in(key, 0))
        alone = jax.tree.map(
            lambda x: x[None], check_names(loss)._replace(model_state=())
        )
        # No sum and no scaling: bitwise the gradients of a step without accumulation.
        return grads, mean_loss(alone, loss.model_state)

    def add(carry: Any, inputs: Any) -> Any:
        total, state = carry
        index, microbatch = inputs
        grads, result = one(state, microbatch, jax.random.fold_in(key, index))
        check_names(result)
        grads = jax.tree.map(lambda g, t: g.astype(t.dtype), grads, total)
        # Sums are weighted and divided once: microbatches differ in their number of
        # tokens.
        total = jax.tree.map(lambda t, g: t + scaled(g, result.weight), total, grads)
        # The carry is pinned in every iteration: the compiler may replicate it
        # otherwise.
        return (pin(total), result.model_state), result._replace(model_state=())

    inputs = (jnp.arange(num_microbatches), parts)
    (total, state), losses = jax.lax.scan(add, (pin(zeros), state), inputs)
    result = mean_loss(losses, state)
    inverse = 1 / jnp.where(result.weight == 0, 1, result.weight)
    return jax.tree.map(lambda t: scaled(t, inverse), total), result


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies in the dtype of `x`; 0 for a factor of 0, even where `x` is NaN.

    `factor` is float32[], and may be out of the range of the dtype of `x`.

    Example:
        >>> float(scaled(jnp.float32(jnp.nan), jnp.float32(0)))
        0.0
        >>> float(scaled(jnp.float16(0.25), jnp.float32(131072)))
        32768.0
    """
    # In float16 the factor itself could overflow to infinity.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.where(factor == 0, 0, (x.astype(wide) * factor).astype(x.dtype))


def unit_of(weights: jax.Array) -> jax.Array:
    """Returns the largest weight float32[] as the unit of all weights; 1 if it is 0.

    In this unit no gradient grows, and gradients of microbatches of equal weight are
    not scaled.

    Example:
        >>> [float(unit_of(jnp.array(weights))) for weights in ([3.0, 5.0], [0.0, 0.0])]
        [5.0, 1.0]
    """
    largest = jnp.max(weights)
    return jnp.where(largest > 0, largest, 1)
