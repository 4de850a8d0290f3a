"""Random token dropping and progressive layer dropping in the blocks of a stack."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.ops.keys import fold_name
from zjax.ops.remat import residuals_of, vjp_with
from zjax.ops.tokens import draw_subset, on_subset
from zjax.typing import (
    Auxiliary,
    Dropping,
    Params,
    Segment,
    Stack,
)


class BlockInput(NamedTuple):
    """Inputs of a block besides parameters, carry and context.

    A tree of arrays [N, ...] holds the inputs of N blocks.
    """

    key: jax.Array | None
    """Random key; None in evaluation."""
    indices: jax.Array | None = None
    """int32[B, K], tokens of each row that the block runs on; None for all."""
    is_kept: jax.Array | None = None
    """bool[], whether the block runs; None for a block that always runs."""
    probability: jax.Array | None = None
    """float32[], probability that the block runs, above 0."""


def make_inputs(keys: jax.Array | None, dropping: Dropping) -> BlockInput:
    """Makes the inputs of all N blocks, which run on all tokens; keys are [N] or None.

    `draw_tokens` then sets the indices of blocks that run on a subset.

    Reference:
        Zhang and He, Progressive Layer Dropping (arXiv:2010.13369), section 4.2.
    """
    if keys is None or dropping.theta is None:
        return BlockInput(keys)
    depths = jnp.arange(1, len(keys) + 1) / len(keys)
    draw = functools.partial(make_input, theta=dropping.theta)
    return jax.vmap(draw)(keys, depths)


def make_input(key: jax.Array, depth: Any, theta: Any) -> BlockInput:
    """Makes the input of a block at `depth`, a fraction of the N blocks above 0 to 1.

    `theta` is the probability that the last block runs.
    """
    probability = 1 - depth * (1 - theta)
    # A separate key: the block draws dropout from `key`.
    is_kept = jax.random.bernoulli(fold_name(key, "layer"), probability)
    return BlockInput(key, None, is_kept, probability)


def drops_tokens(dropping: Dropping, carry: Any, key: jax.Array | None) -> bool:
    """Whether blocks between the first and the last run on a subset of the tokens."""
    if key is None or not dropping.num_kept:
        return False
    return dropping.num_kept < jax.tree.leaves(carry)[0].shape[1]


def draw_tokens(keys: jax.Array, carry: Any, num_kept: int) -> jax.Array:
    """Draws the tokens of N blocks from N keys, int32[N, B, `num_kept`]."""
    num_rows, length, *_ = jax.tree.leaves(carry)[0].shape

    def draw(key: jax.Array) -> jax.Array:
        return draw_subset(key, num_rows=num_rows, length=length, num_kept=num_kept)

    return jax.vmap(draw)(keys)


def block_on_tokens(stack: Stack, segment: Segment) -> Callable[..., Any]:
    """Returns `block(params, carry, context, given)` for the tokens of a `BlockInput`.

    The carry holds only the tokens of `given`, the context all tokens.
    """

    def block(params: Params, carry: Any, context: Any, given: BlockInput) -> Any:
        if given.indices is not None:
            assert stack.take_tokens is not None
            context = stack.take_tokens(context, given.indices)
        return segment.block(params, carry, context, given.key)

    return block


def run_block(
    block: Callable[..., Any],
    params: Params,
    carry: Any,
    context: Any,
    given: BlockInput,
) -> Any:
    """Runs a block on the tokens of `given`; a dropped one returns carry and zeros."""
    inputs = context, given
    if given.is_kept is None:
        return _run(block, params, carry, inputs)
    return _run_or_skip(block, params, carry, inputs)


def _run(block: Callable[..., Any], params: Params, carry: Any, inputs: Any) -> Any:
    """Runs a block on all tokens or on the drawn subset."""
    context, given = inputs

    def on_tokens(carry: Any) -> Any:
        return block(params, carry, context, given)

    if given.indices is None:
        return on_tokens(carry)
    return on_subset(on_tokens, carry, given.indices)


class Tally(NamedTuple):
    """Metric of blocks that may be dropped: a sum, and a count of blocks."""

    total: jax.Array
    """float32[], sum of the metric over the blocks that ran."""
    number: jax.Array
    """float32[], number of blocks that ran."""


def mean_metric(values: Sequence[Any], num_blocks: int) -> jax.Array:
    """Averages a metric over the blocks that ran; 0 if no block ran.

    Example:
        >>> three, one, none = jnp.float32(3), jnp.float32(1), jnp.float32(0)
        >>> float(mean_metric([three, one], 4))
        1.0
        >>> float(mean_metric([Tally(three, one), Tally(none, none)], 2))
        3.0
    """
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), values)
    if isinstance(total, Tally):
        return total.total / jnp.maximum(total.number, 1)
    return total / num_blocks


def over_probability(
    carry: Any, results: tuple[Any, Auxiliary], probability: jax.Array
) -> tuple[Any, Auxiliary]:
    """Divides a block's loss and change of the carry by the block's probability.

    Metrics become tallies; totals stay exact counts.
    """

    def scale(before: jax.Array, after: jax.Array) -> jax.Array:
        # In float32: the division would magnify the rounding of a bfloat16 difference.
        wide = before.astype(jnp.float32)
        added = (after.astype(jnp.float32) - wide) / probability
        return (wide + added).astype(before.dtype)

    after, auxiliary = results
    loss = jax.tree.map(lambda x: x / probability, auxiliary.loss)
    scaled = jax.tree.map(scale, carry, after)
    return scaled, auxiliary._replace(loss=loss, metrics=tallies(auxiliary.metrics))


def tallies(metrics: Mapping[str, jax.Array]) -> dict[str, Tally]:
    """Wraps the metrics of a block that runs as tallies."""
    return {name: Tally(x, jnp.float32(1)) for name, x in metrics.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_or_skip(
    block: Callable[..., Any], params: Params, carry: Any, inputs: Any
) -> Any:
    """Runs a block in one of two branches; a dropped block computes nothing.

    The change of the carry and the auxiliary loss are divided by the probability: the
    mean over draws equals the result of a block that always runs. Residuals of a
    dropped block are zeros. Differentiated by JAX, a branch would return copies of the
    parameters for the backward pass.
    """
    results, _ = _forward(block, params, carry, inputs)
    return results


def _vjp(block, params, carry, inputs):
    """Returns `jax.vjp` of scaled carry and loss, with metrics and totals aside."""
    _, given = inputs

    def run(params: Params, carry: Any) -> Any:
        results = _run(block, params, carry, inputs)
        scaled, auxiliary = over_probability(carry, results, given.probability)
        return (scaled, auxiliary.loss), auxiliary._replace(loss=None)

    return jax.vjp(run, params, carry, has_aux=True)


def _forward(block, params, carry, inputs):
    """Runs or skips the block, and saves residuals."""
    operands = params, carry, inputs

    def running(*operands: Any) -> Any:
        (new, loss), pull, auxiliary = _vjp(block, *operands)
        return (new, auxiliary._replace(loss=loss)), residuals_of(pull, operands)

    # Both branches of `lax.cond` must return equal shapes, residuals included.
    shapes = jax.eval_shape(running, *operands)

    def skipping(*operands: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (_, auxiliary), residuals = zeros
        return (operands[1], auxiliary), residuals

    results, residuals = jax.lax.cond(inputs[1].is_kept, running, skipping, *operands)
    return results, (operands, residuals)


def _backward(block, saved, cotangents):
    """Returns the cotangents of parameters and carry; zeros for skipped parameters."""
    operands, residuals = saved
    cotangent, auxiliary = cotangents

    def running(operands: Any, residuals: Any, *cotangents: Any) -> Any:
        # Traced again for the form of `pull` alone: with saved residuals nothing reads
        # the recomputed forward pass, and XLA removes it.
        _, pull, _ = _vjp(block, *operands)
        return vjp_with(residuals, pull, operands)(cotangents)

    def skipping(operands: Any, residuals: Any, cotangent: Any, _: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, operands[0]), cotangent

    grads, cotangent = jax.lax.cond(
        operands[2][1].is_kept,
        running,
        skipping,
        operands,
        residuals,
        cotangent,
        auxiliary.loss,
    )
    return grads, cotangent, None  # context and draws get no gradient


_run_or_skip.defvjp(_forward, _backward)
