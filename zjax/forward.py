"""The forward pass of a model that is a line of blocks, and the loss that follows.

Blocks run one by one, or in a loop over a few of them at a time, which compiles faster
and runs slower.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import ModelError, Problem
from zjax.ops.keys import fold_in, loss_key
from zjax.parallel import remat
from zjax.sharding.layers import layers_of
from zjax.typing import (
    Auxiliary,
    Batch,
    Loss,
    Metrics,
    ModelState,
    Params,
    Segment,
    Stack,
)

AUXILIARY_LOSS = "auxiliary_loss"
"""The metric that shows what blocks add to the loss."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How blocks run in one program.

    Args:
        layers_per_scan: Blocks in one turn of a loop over those of a segment. 0 runs
            blocks one by one; so do segments that it does not divide.
        policy: What the backward pass keeps, as `zjax.parallel.remat.recompute` has it.
        memory: Where what it keeps is stored until then.
    """

    layers_per_scan: int = 0
    policy: remat.Policy = "none"
    memory: remat.Memory = "device"

    def turn_size(self, num_blocks: int) -> int:
        """Blocks in one turn of a loop; 0 where there is no loop."""
        stride = self.layers_per_scan
        return 0 if stride and num_blocks % stride else stride


ONE_BY_ONE = Execution()


def loss_of(
    stack: Stack, execution: Execution = ONE_BY_ONE
) -> Callable[[Params, ModelState, Batch, jax.Array | None], Loss]:
    """Makes the loss of a model from its stack.

    Args:
        stack: The model as a line of blocks.
        execution: How the blocks run.

    Returns:
        `loss(params, model_state, batch, key)` for `zjax.Model`: the mean over the
        units of the head, and what blocks add to it. The model state stays as it is.

    Raises:
        ModelError: Head and blocks give metrics of the same name; as the loss runs.
    """

    def loss(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        carry, auxiliary = run_stack(stack, params, batch, loss_key(key), execution)
        _, _, head = stack.split(params)
        total, weight, sums = stack.head(head, carry, batch)
        found = loss_of_sums(total, weight, sums, auxiliary)
        return found._replace(model_state=model_state)

    return loss


def run_stack(
    stack: Stack,
    params: Params,
    batch: Batch,
    key: jax.Array | None,
    execution: Execution = ONE_BY_ONE,
) -> tuple[Any, Auxiliary]:
    """Runs the embedding and all blocks.

    Args:
        stack: The model as a line of blocks.
        params: Of the model.
        batch: Arrays.
        key: The embedding uses `fold_in(key, 0)`, block i of all segments
            `fold_in(key, i + 1)`. None is evaluation.
        execution: How the blocks run.

    Returns:
        The carry that enters the head, and what the blocks give besides.
    """
    embed, segments, _ = stack.split(params)
    carry, context = stack.embed(embed, batch, fold_in(key, 0))
    first, given = 1, []
    for segment, blocks in zip(stack.segments, segments, strict=True):
        numbers = jnp.arange(first, first + segment.num_blocks)
        keys = None if key is None else _fold_in(key, numbers)
        carry, own = _run_segment(segment, blocks, carry, context, keys, execution)
        given += own
        first += segment.num_blocks
    carry = jax.tree.map(lambda x: remat.mark(x, remat.INPUT), carry)
    return carry, combine(given)


def _run_segment(
    segment: Segment,
    blocks: Params,
    carry: Any,
    context: Any,
    keys: jax.Array | None,
    execution: Execution,
) -> tuple[Any, list[Auxiliary]]:
    number = segment.num_blocks
    turn = execution.turn_size(number)
    block = remat.recompute(
        segment.block,
        execution.policy,
        in_loop=0 < turn < number,
        memory=execution.memory,
    )

    def step(params: Params, carry: Any, key: jax.Array | None) -> Any:
        return block(params, carry, context, key)

    inputs = (None,) * (turn or number)
    if keys is not None:
        inputs = tuple(keys[i::turn] for i in range(turn)) if turn else tuple(keys)
    carry, given = run_blocks(step, blocks, carry, inputs, turn_size=turn)
    if turn:
        given = [own for i in range(number // turn) for own in _turn(given, i)]
    return carry, list(given)


def _turn(given: Sequence[Auxiliary], number: int) -> list[Auxiliary]:
    return [jax.tree.map(lambda x: x[number], own) for own in given]


def run_blocks(
    step: Callable[[Params, Any, Any], tuple[Any, Any]],
    blocks: Params,
    carry: Any,
    inputs: Sequence[Any],
    *,
    turn_size: int,
) -> tuple[Any, tuple[Any, ...]]:
    """Threads a value through equal blocks.

    Args:
        step: `step(params, carry, input) -> (carry, output)`.
        blocks: Arrays that stack the parameters of the blocks, or their `Layers`.
        carry: What enters the first block.
        inputs: One tree per block or, in a loop, per block of a turn, then stacked over
            the turns.
        turn_size: Blocks in one turn of a loop; 0 for no loop.

    Returns:
        What leaves the last block, and the outputs in the form of the inputs.

    Example:
        >>> def step(params, x, key):
        ...     return params * x, x
        >>> last, seen = run_blocks(step, jnp.arange(1, 4), 2, (None,) * 3, turn_size=0)
        >>> int(last), [int(x) for x in seen]
        (12, [2, 2, 4])
    """

    def run_turn(carry: Any, blocks: Params, inputs: Sequence[Any]) -> Any:
        outputs = []
        layers = layers_of(blocks, len(inputs))
        for params, given in zip(layers, inputs, strict=True):
            carry, output = step(params, carry, given)
            outputs.append(output)
        return carry, tuple(outputs)

    if turn_size == 0:
        return run_turn(carry, blocks, inputs)
    turns = jax.tree.map(lambda x: x.reshape(-1, turn_size, *x.shape[1:]), blocks)
    xs = (turns, tuple(inputs))
    return jax.lax.scan(lambda carry, xs: run_turn(carry, *xs), carry, xs)


def combine(given: Sequence[Auxiliary]) -> Auxiliary:
    """What all blocks give besides their carries.

    Args:
        given: By each block.

    Returns:
        The sum of the losses, and the mean of each metric over the blocks that give it.

    Example:
        >>> one, two = jnp.float32(1), jnp.float32(2)
        >>> both = combine([Auxiliary(one, {"drop": two}), Auxiliary(two), Auxiliary()])
        >>> float(both.loss), float(both.metrics["drop"])
        (3.0, 2.0)
    """
    losses = [own.loss for own in given if own.loss is not None]
    by_name = collections.defaultdict(list)
    for own in given:
        for name, x in own.metrics.items():
            by_name[name].append(x)
    return Auxiliary(
        functools.reduce(jnp.add, losses) if losses else None,
        {name: functools.reduce(jnp.add, x) / len(x) for name, x in by_name.items()},
    )


def loss_of_sums(
    total: jax.Array, weight: jax.Array, sums: Metrics, auxiliary: Auxiliary
) -> Loss:
    """The loss of a microbatch from what the head of a stack and its blocks return.

    Args:
        total: Sum of the loss.
        weight: Over how many units; 0 gives a mean of 0.
        sums: Of the metrics of the head.
        auxiliary: What the blocks add to the mean, and their metrics.

    Returns:
        Means.

    Raises:
        ModelError: Head and blocks give metrics of the same name.

    Example:
        >>> six, three, one = (jnp.float32(x) for x in (6, 3, 1))
        >>> loss = loss_of_sums(six, three, {}, Auxiliary(one))
        >>> float(loss.value), float(loss.metrics["auxiliary_loss"])
        (3.0, 1.0)
    """
    divisor = jnp.where(weight > 0, weight, 1.0)
    value, metrics = total / divisor, {name: x / divisor for name, x in sums.items()}
    shown = dict(auxiliary.metrics)
    if auxiliary.loss is not None:
        value += auxiliary.loss
        _check_apart({AUXILIARY_LOSS: auxiliary.loss}, shown)
        shown[AUXILIARY_LOSS] = auxiliary.loss
    _check_apart(shown, metrics)
    metrics = {n: jnp.asarray(x, jnp.float32) for n, x in (metrics | shown).items()}
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return Loss(jnp.asarray(value, jnp.float32), weight, (), metrics)


def _check_apart(some: Metrics, others: Metrics) -> None:
    problem, remedy = "is given twice, by blocks or head", "give one another name"
    problems = [
        Problem(f"metrics/{name}", str(some[name].dtype), problem, remedy)
        for name in sorted(some.keys() & others.keys())
    ]
    if problems:
        raise ModelError(*problems)


def _fold_in(key: jax.Array, numbers: jax.Array) -> jax.Array:
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
