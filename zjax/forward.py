"""The forward pass of a `Stack`, and its loss.

Blocks run one by one, or in a `lax.scan` over a few at a time, which compiles faster
and runs slower.
"""

import collections
import dataclasses
import functools
import itertools
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
    Totals,
)

AUXILIARY_LOSS = "auxiliary_loss"
"""Name of the metric with the auxiliary loss of the blocks."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How blocks run in one program.

    Args:
        layers_per_scan: Blocks per scan iteration. 0, or a number that does not divide
            a segment, runs blocks one by one.
        policy: Residuals to save, as in `zjax.parallel.remat.recompute`.
        memory: Where residuals are stored.
    """

    layers_per_scan: int = 0
    policy: remat.Policy = "none"
    memory: remat.Memory = "device"

    def scan_size(self, num_blocks: int) -> int:
        """Blocks per scan iteration; 0 for no scan."""
        stride = self.layers_per_scan
        return 0 if stride and num_blocks % stride else stride


ONE_BY_ONE = Execution()


def loss_of(
    stack: Stack, execution: Execution = ONE_BY_ONE
) -> Callable[[Params, ModelState, Batch, jax.Array | None], Loss]:
    """Makes the loss of a model from its stack.

    Args:
        stack: The model as a sequence of blocks.
        execution: How the blocks run.

    Returns:
        `loss(params, model_state, batch, key)` for `zjax.Model`: the mean over the
        head's units, plus auxiliary losses. The model state is unchanged.

    Raises:
        ModelError: Head and blocks give metrics of the same name, or blocks give other
            totals than their segment declares; raised by the loss.
    """

    def loss(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        carry, auxiliaries = run_stack(stack, params, batch, loss_key(key), execution)
        combined = combine(auxiliaries)
        totals = stack_totals(stack.segments, auxiliaries)
        _, _, head = stack.split(params)
        total, weight, sums = stack.head(head, carry, batch)
        result = loss_of_sums(total, weight, sums, combined, totals)
        return result._replace(model_state=model_state)

    return loss


def run_stack(
    stack: Stack,
    params: Params,
    batch: Batch,
    key: jax.Array | None,
    execution: Execution = ONE_BY_ONE,
) -> tuple[Any, list[Auxiliary]]:
    """Runs the embedding and all blocks.

    Args:
        stack: The model as a sequence of blocks.
        params: Parameters of the model.
        batch: Tree of arrays.
        key: The embedding uses `fold_in(key, 0)`, block i of all segments `fold_in(key,
            i + 1)`. None means evaluation.
        execution: How the blocks run.

    Returns:
        The carry for the head, and what each block returns besides its carry.
    """
    embed, segments, _ = stack.split(params)
    carry, context = stack.embed(embed, batch, fold_in(key, 0))
    first, auxiliaries = 1, []
    for segment, blocks in zip(stack.segments, segments, strict=True):
        numbers = jnp.arange(first, first + segment.num_blocks)
        keys = None if key is None else _fold_in(key, numbers)
        carry, added = _run_segment(segment, blocks, carry, context, keys, execution)
        auxiliaries += added
        first += segment.num_blocks
    carry = jax.tree.map(lambda x: remat.mark(x, remat.INPUT), carry)
    return carry, auxiliaries


def _run_segment(
    segment: Segment,
    blocks: Params,
    carry: Any,
    context: Any,
    keys: jax.Array | None,
    execution: Execution,
) -> tuple[Any, list[Auxiliary]]:
    num_blocks = segment.num_blocks
    size = execution.scan_size(num_blocks)
    block = remat.recompute(
        segment.block,
        execution.policy,
        in_loop=0 < size < num_blocks,
        memory=execution.memory,
    )

    def step(params: Params, carry: Any, key: jax.Array | None) -> Any:
        return block(params, carry, context, key)

    inputs = (None,) * (size or num_blocks)
    if keys is not None:
        inputs = tuple(keys[i::size] for i in range(size)) if size else tuple(keys)
    carry, outputs = run_blocks(step, blocks, carry, inputs, scan_size=size)
    if size:
        outputs = [x for i in range(num_blocks // size) for x in _select(outputs, i)]
    return carry, list(outputs)


def _select(stacked: Sequence[Auxiliary], iteration: int) -> list[Auxiliary]:
    return [jax.tree.map(lambda x: x[iteration], each) for each in stacked]


def run_blocks(
    step: Callable[[Params, Any, Any], tuple[Any, Any]],
    blocks: Params,
    carry: Any,
    inputs: Sequence[Any],
    *,
    scan_size: int,
) -> tuple[Any, tuple[Any, ...]]:
    """Threads a carry through equal blocks.

    Args:
        step: `step(params, carry, input) -> (carry, output)`.
        blocks: Arrays that stack the parameters of the blocks, or their `Layers`.
        carry: Input of the first block.
        inputs: One tree per block; with a scan, one per block of an iteration, stacked
            over the iterations.
        scan_size: Blocks per scan iteration; 0 for no scan.

    Returns:
        The carry of the last block, and the outputs in the form of the inputs.

    Example:
        >>> def step(params, x, key):
        ...     return params * x, x
        >>> last, seen = run_blocks(step, jnp.arange(1, 4), 2, (None,) * 3, scan_size=0)
        >>> int(last), [int(x) for x in seen]
        (12, [2, 2, 4])
    """

    def run_few(carry: Any, blocks: Params, inputs: Sequence[Any]) -> Any:
        outputs = []
        layers = layers_of(blocks, len(inputs))
        for params, block_input in zip(layers, inputs, strict=True):
            carry, output = step(params, carry, block_input)
            outputs.append(output)
        return carry, tuple(outputs)

    if scan_size == 0:
        return run_few(carry, blocks, inputs)
    grouped = jax.tree.map(lambda x: x.reshape(-1, scan_size, *x.shape[1:]), blocks)
    xs = (grouped, tuple(inputs))
    return jax.lax.scan(lambda carry, xs: run_few(carry, *xs), carry, xs)


def combine(auxiliaries: Sequence[Auxiliary]) -> Auxiliary:
    """Combines the losses and metrics that blocks return.

    Args:
        auxiliaries: One per block.

    Returns:
        The sum of the losses; each metric's mean over the blocks that return it.

    Example:
        >>> one, two = jnp.float32(1), jnp.float32(2)
        >>> both = combine([Auxiliary(one, {"drop": two}), Auxiliary(two), Auxiliary()])
        >>> float(both.loss), float(both.metrics["drop"])
        (3.0, 2.0)
    """
    losses = [each.loss for each in auxiliaries if each.loss is not None]
    by_name = collections.defaultdict(list)
    for each in auxiliaries:
        for name, x in each.metrics.items():
            by_name[name].append(x)
    return Auxiliary(
        functools.reduce(jnp.add, losses) if losses else None,
        {name: functools.reduce(jnp.add, x) / len(x) for name, x in by_name.items()},
    )


def stack_totals(
    segments: Sequence[Segment], auxiliaries: Sequence[Auxiliary]
) -> Totals:
    """Stacks the totals of the blocks of each segment.

    Args:
        segments: Segments of a stack.
        auxiliaries: One per block of all segments.

    Raises:
        ModelError: A block gives other totals than its segment declares.

    Example:
        >>> segment = Segment(lambda *inputs: None, 2, totals={"load": (3,)})
        >>> blocks = [Auxiliary(totals={"load": jnp.arange(3)})] * 2
        >>> stack_totals([segment], blocks)[0]["load"].tolist()
        [[0, 1, 2], [0, 1, 2]]
    """
    remaining = iter(auxiliaries)
    totals = []
    for segment in segments:
        blocks = [*itertools.islice(remaining, segment.num_blocks)]
        for each in blocks:
            check_totals(segment, each)
        stacks = {n: jnp.stack([x.totals[n] for x in blocks]) for n in segment.totals}
        totals.append(stacks)
    return tuple(totals)


def named_totals(totals: Totals) -> Metrics:
    """Names totals as metrics of a step.

    Args:
        totals: Arrays of each segment by name.

    Returns:
        The arrays by name, followed by the index of the segment if several have it.

    Example:
        >>> one = jnp.int32(1)
        >>> sorted(named_totals(({"load": one}, {"load": one, "seen": one})))
        ['load/0', 'load/1', 'seen']
    """
    count = collections.Counter(name for each in totals for name in each)
    return {
        name if count[name] == 1 else f"{name}/{i}": x
        for i, each in enumerate(totals)
        for name, x in each.items()
    }


def check_totals(segment: Segment, auxiliary: Auxiliary) -> None:
    """Refuses totals of a block that are not those its segment declares.

    Raises:
        ModelError: Names every such array.
    """
    declared = {n: f"int32{list(shape)}" for n, shape in segment.totals.items()}
    given = {n: f"{x.dtype}{list(x.shape)}" for n, x in auxiliary.totals.items()}
    problems = [
        Problem(
            f"totals/{name}",
            given.get(name),
            f"is not the {declared.get(name)} that the segment declares",
            "let Auxiliary.totals of a block and Segment.totals agree",
        )
        for name in sorted(declared.keys() | given.keys())
        if declared.get(name) != given.get(name)
    ]
    if problems:
        raise ModelError(*problems)


def loss_of_sums(
    total: jax.Array,
    weight: jax.Array,
    sums: Metrics,
    auxiliary: Auxiliary,
    totals: Totals = (),
) -> Loss:
    """The loss of a microbatch from the head's sums and the blocks' auxiliaries.

    Args:
        total: Sum of the loss.
        weight: Number of units; 0 gives a mean of 0.
        sums: Sums of the head's metrics.
        auxiliary: Loss to add to the mean, and metrics.
        totals: Totals of the blocks.

    Returns:
        Means, and the totals.

    Raises:
        ModelError: Two metrics or totals of head and blocks have the same name.

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
        _check_names_differ({AUXILIARY_LOSS: auxiliary.loss}, shown)
        shown[AUXILIARY_LOSS] = auxiliary.loss
    _check_names_differ(shown, metrics)
    _check_names_differ(named_totals(totals), shown | metrics)
    metrics = {n: jnp.asarray(x, jnp.float32) for n, x in (metrics | shown).items()}
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return Loss(jnp.asarray(value, jnp.float32), weight, (), metrics, totals)


def _check_names_differ(some: Metrics, others: Metrics) -> None:
    problem, remedy = "is given twice, by blocks or head", "rename one of them"
    problems = [
        Problem(f"metrics/{name}", str(some[name].dtype), problem, remedy)
        for name in sorted(some.keys() & others.keys())
    ]
    if problems:
        raise ModelError(*problems)


def _fold_in(key: jax.Array, numbers: jax.Array) -> jax.Array:
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
