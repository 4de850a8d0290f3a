"""Blocks that run on some of the tokens, or not at all, in a training step."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.ops.keys import fold_name
from zjax.ops.remat import residuals_of, vjp_with
from zjax.ops.token_subset import draw_subset, on_subset
from zjax.typing import (
    DROPPING,
    Auxiliary,
    Batch,
    Dropping,
    Params,
    Segment,
    Stack,
)


class BlockInput(NamedTuple):
    """What a block reads besides parameters, stream and context.

    A tree of arrays [N, ...] stands for the inputs of N blocks.
    """

    key: jax.Array | None
    """Random key; None in evaluation."""
    indices: jax.Array | None = None
    """int32[B, K], the tokens on which it runs; None for all."""
    is_kept: jax.Array | None = None
    """bool[], whether it runs; None if it does."""
    probability: jax.Array | None = None
    """float32[], probability of that."""


def make_inputs(keys: jax.Array | None, dropping: Dropping) -> BlockInput:
    """The inputs of all blocks on all tokens.

    Reference:
        Zhang and He, Progressive Layer Dropping (arXiv:2010.13369), section 4.2.
    """
    if keys is None or dropping.theta is None:
        return BlockInput(keys)
    depths = jnp.arange(1, len(keys) + 1) / len(keys)
    draw = functools.partial(make_input, theta=dropping.theta)
    return jax.vmap(draw)(keys, depths)


def make_input(key: jax.Array, depth: Any, theta: Any) -> BlockInput:
    """The input of one block on all tokens, with the draw of whether it runs."""
    probability = 1 - depth * (1 - theta)
    is_kept = jax.random.bernoulli(fold_name(key, "layer"), probability)
    return BlockInput(key, None, is_kept, probability)


def split_dropping(batch: Batch) -> tuple[Batch, Dropping]:
    """A batch without its `Dropping`, and that; the default one if there is none.

    Example:
        >>> split_dropping({"x": 1, "dropping": Dropping(num_kept=4)})[1].num_kept
        4
    """
    if not isinstance(batch, Mapping) or DROPPING not in batch:
        return batch, Dropping()
    others = {name: x for name, x in batch.items() if name != DROPPING}
    return others, batch[DROPPING]


def drops_tokens(dropping: Dropping, carry: Any, key: jax.Array | None) -> bool:
    """Whether blocks between the first and the last run on a subset of the tokens."""
    if key is None or not dropping.num_kept:
        return False
    return dropping.num_kept < jax.tree.leaves(carry)[0].shape[1]


def draw_tokens(keys: jax.Array, carry: Any, num_kept: int) -> jax.Array:
    """Draws the tokens of several blocks."""
    num_rows, length, *_ = jax.tree.leaves(carry)[0].shape

    def draw(key: jax.Array) -> jax.Array:
        return draw_subset(key, num_rows=num_rows, length=length, num_kept=num_kept)

    return jax.vmap(draw)(keys)


def block_on_tokens(stack: Stack, segment: Segment) -> Callable[..., Any]:
    """`block(params, carry, context, given)` of the tokens of a `BlockInput`.

    The carry has these tokens alone, the context all of them.
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
    """Runs a block on the tokens of its input, or not at all."""
    inputs = context, given
    if given.is_kept is None:
        return _run(block, params, carry, inputs)
    return _run_or_skip(block, params, carry, inputs)


def _run(block: Callable[..., Any], params: Params, carry: Any, inputs: Any) -> Any:
    context, given = inputs

    def on_tokens(carry: Any) -> Any:
        return block(params, carry, context, given)

    if given.indices is None:
        return on_tokens(carry)
    return on_subset(on_tokens, carry, given.indices)


class Tally(NamedTuple):
    """A metric of blocks that may be dropped: zeros where one is."""

    total: jax.Array
    """float32[], its sum over the blocks that ran."""
    number: jax.Array
    """float32[], how many these are."""


def mean_metric(values: Sequence[Any], num_blocks: int) -> jax.Array:
    """The mean of a metric over the blocks that ran; 0 if none of them did.

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
    """What a block adds, divided by the probability that it runs; counts are exact.

    Its metrics are tallies.
    """

    def scale(before: jax.Array, after: jax.Array) -> jax.Array:
        wide = before.astype(jnp.float32)
        added = (after.astype(jnp.float32) - wide) / probability
        return (wide + added).astype(before.dtype)

    after, auxiliary = results
    loss = jax.tree.map(lambda x: x / probability, auxiliary.loss)
    scaled = jax.tree.map(scale, carry, after)
    return scaled, auxiliary._replace(loss=loss, metrics=tallies(auxiliary.metrics))


def tallies(metrics: Mapping[str, jax.Array]) -> dict[str, Tally]:
    """Those of a block that runs."""
    return {name: Tally(x, jnp.float32(1)) for name, x in metrics.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_or_skip(
    block: Callable[..., Any], params: Params, carry: Any, inputs: Any
) -> Any:
    """Runs a block in one of two branches; one that is dropped computes nothing.

    What it adds to the carry and its auxiliary loss are divided by its probability:
    their mean over draws is that of a block that always runs. Residuals of a dropped
    block are zeros. Differentiated by itself, a branch would return copies of
    the parameters for the backward pass.
    """
    results, _ = _forward(block, params, carry, inputs)
    return results


def _vjp(block, params, carry, inputs):
    """`jax.vjp` of the scaled carry and the auxiliary loss; metrics and totals."""
    _, given = inputs

    def run(params: Params, carry: Any) -> Any:
        results = _run(block, params, carry, inputs)
        scaled, auxiliary = over_probability(carry, results, given.probability)
        return (scaled, auxiliary.loss), auxiliary._replace(loss=None)

    return jax.vjp(run, params, carry, has_aux=True)


def _forward(block, params, carry, inputs):
    operands = params, carry, inputs

    def running(*operands: Any) -> Any:
        (new, loss), pull, auxiliary = _vjp(block, *operands)
        return (new, auxiliary._replace(loss=loss)), residuals_of(pull, operands)

    shapes = jax.eval_shape(running, *operands)

    def skipping(*operands: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (_, auxiliary), residuals = zeros
        return (operands[1], auxiliary), residuals

    results, residuals = jax.lax.cond(inputs[1].is_kept, running, skipping, *operands)
    return results, (operands, residuals)


def _backward(block, saved, cotangents):
    operands, residuals = saved
    cotangent, auxiliary = cotangents

    def running(operands: Any, residuals: Any, *cotangents: Any) -> Any:
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
    return grads, cotangent, None


_run_or_skip.defvjp(_forward, _backward)
