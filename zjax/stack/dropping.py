"""Random token dropping and progressive layer dropping in the blocks of a stack."""

import functools
from collections.abc import Callable, Sequence
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
    number: Any = None
    """int32[], index of the block in the stack, for `Stack.of_block`."""


def inner_blocks(num_blocks: int, dropping: Dropping, key: Any) -> range:
    """Returns the numbers of the blocks that run on some tokens, if a step drops any.

    The first and the last block of a model always see all tokens.
    """
    drops_tokens = key is not None and dropping.num_kept
    return range(1, num_blocks - 1) if drops_tokens else range(0)


def of_block(dropping: Dropping, is_inner: bool) -> Dropping:
    """Returns what a block draws alone: no tokens in a span or in an outer block."""
    draws_tokens = is_inner and not dropping.once
    return dropping if draws_tokens else Dropping(theta=dropping.theta)


def make_input(
    key: jax.Array | None, number: Any, num_blocks: int, dropping: Dropping, carry: Any
) -> BlockInput:
    """Draws the tokens and the layer of block `number`, from 0, of `num_blocks` blocks.

    `dropping` is a result of `of_block`; `carry` gives the shapes.

    Reference:
        Zhang and He, Progressive Layer Dropping (arXiv:2010.13369), section 4.2.
    """
    indices, theta = draw_tokens(dropping, key, carry), dropping.theta
    if key is None or theta is None:
        return BlockInput(key, indices, number=number)
    # Slots of a pipeline that have no block give any number.
    depth = (jnp.clip(number, 0, num_blocks - 1) + 1) / num_blocks
    probability = 1 - depth * (1 - theta)
    # A separate key: the block draws dropout from `key`.
    is_kept = jax.random.bernoulli(fold_name(key, "layer"), probability)
    return BlockInput(key, indices, is_kept, probability, number)


def make_inputs(
    keys: jax.Array | None, dropping: Dropping, numbers: range, carry: Any
) -> BlockInput:
    """Makes the inputs of adjacent blocks by `make_input`, from keys of all blocks."""
    if keys is None:
        return BlockInput(None, number=jnp.asarray(numbers))

    def make(key: jax.Array, number: Any) -> BlockInput:
        return make_input(key, number, len(keys), dropping, carry)

    return jax.vmap(make)(keys[numbers.start : numbers.stop], jnp.asarray(numbers))


def draw_tokens(dropping: Dropping, key: Any, carry: Any) -> jax.Array | None:
    """Draws tokens of each row of a carry, int32[B, `num_kept`]; None for all."""
    if key is None or not dropping.num_kept:
        return None
    num_rows, length, *_ = jax.tree.leaves(carry)[0].shape
    if dropping.num_kept >= length:
        return None
    num_kept = dropping.num_kept
    return draw_subset(key, num_rows=num_rows, length=length, num_kept=num_kept)


def draw_span(
    stack: Stack, dropping: Dropping, key: Any, carry: Any, context: Any
) -> tuple[jax.Array | None, Any]:
    """Draws the tokens of all inner blocks, and selects what these read of the context.

    `key` is the key of the first inner block.
    """
    indices = draw_tokens(dropping, key, carry)
    if indices is None:
        return None, context
    assert stack.take_tokens is not None
    return indices, stack.take_tokens(context, indices)


def on_span(
    run: Callable[[Any, Any], Any], stack: Stack, dropping: Dropping, key: Any
) -> Callable[[Any, Any], Any]:
    """Makes `run(stream, context) -> stream` of inner blocks run on the span's tokens.

    A stream is the carry, followed by results that have no tokens.
    """

    def run_narrow(stream: Any, context: Any) -> Any:
        carry, *others = stream
        indices, narrow = draw_span(stack, dropping, key, carry, context)
        if indices is None:
            return run(stream, context)

        def on_tokens(carry: Any) -> tuple[Any, Any]:
            carry, *others_after = run((carry, *others), narrow)
            return carry, others_after

        carry, others = on_subset(on_tokens, carry, indices)
        return carry, *others

    return run_narrow


def block_on_tokens(stack: Stack, segment: Segment) -> Callable[..., Any]:
    """Returns `block(params, carry, context, given)` for the tokens of a `BlockInput`.

    The carry holds only the tokens of `given`, the context all tokens.
    """

    def block(params: Params, carry: Any, context: Any, given: BlockInput) -> Any:
        if stack.of_block is not None:
            context = stack.of_block(context, given.number)
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
    """Runs a block on all tokens or on the drawn subset, scaled by the probability."""
    context, given = inputs

    def on_tokens(carry: Any) -> Any:
        return block(params, carry, context, given)

    if given.indices is None:
        results = on_tokens(carry)
    else:
        results = on_subset(on_tokens, carry, given.indices)
    if given.probability is None:
        return results
    return over_probability(carry, results, given.probability)


class Tally(NamedTuple):
    """Metric of blocks that may be dropped: a sum, and a count of blocks."""

    total: jax.Array
    """float32[], sum of the metric over the blocks that ran."""
    number: jax.Array
    """float32[], number of blocks that ran."""


def mean_metric(values: Sequence[Any], num_blocks: Sequence[int]) -> jax.Array:
    """Averages sums of a metric over the blocks that ran; 0 if no block ran.

    Example:
        >>> three, one, none = jnp.float32(3), jnp.float32(1), jnp.float32(0)
        >>> float(mean_metric([three, one], [3, 1]))
        1.0
        >>> float(mean_metric([Tally(three, one), Tally(none, none)], [1, 1]))
        3.0
    """
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), values)
    if isinstance(total, Tally):
        return total.total / jnp.maximum(total.number, 1)
    return total / sum(num_blocks)


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
    one = jnp.float32(1)
    tallies = {name: Tally(x, one) for name, x in auxiliary.metrics.items()}
    return scaled, auxiliary._replace(loss=loss, metrics=tallies)


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
    """Returns `jax.vjp` of carry and loss, with metrics and totals aside."""

    def run(params: Params, carry: Any) -> Any:
        scaled, auxiliary = _run(block, params, carry, inputs)
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
