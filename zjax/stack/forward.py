"""Forward pass and loss of a `Stack`.

Blocks run one by one, or in a `lax.scan` over a few blocks per iteration, which
compiles faster and runs slower.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import ModelError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.ops import remat
from zjax.ops.keys import fold_in, loss_key
from zjax.sharding.layers import LayerOf, cut_layers, layers_of
from zjax.stack.dropping import (
    BlockInput,
    block_on_tokens,
    inner_blocks,
    make_inputs,
    mean_metric,
    of_block,
    on_span,
    run_block,
)
from zjax.typing import (
    NOTHING_DROPPED,
    Auxiliary,
    Batch,
    Dropping,
    Loss,
    Metrics,
    Model,
    ModelState,
    Params,
    Segment,
    Stack,
    Totals,
)

AUXILIARY_LOSS = "auxiliary_loss"
"""Name of the metric that holds the auxiliary loss of the blocks."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How blocks run in one program.

    Args:
        layers_per_scan: Number of blocks per scan iteration, 0 or more. 0, or a number
            that does not divide a segment, runs blocks one by one.
        policy: Name of the residuals to save, as in `zjax.ops.remat.recompute`.
        memory: Memory that stores the residuals.
    """

    layers_per_scan: int = 0
    policy: remat.Policy = "none"
    memory: remat.Memory = "device"

    def scan_size(self, num_blocks: int) -> int:
        """Returns the number of blocks per scan iteration; 0 for no scan."""
        stride = self.layers_per_scan
        return 0 if stride and num_blocks % stride else stride


ONE_BY_ONE = Execution()


def loss_of(stack: Stack, execution: Execution = ONE_BY_ONE) -> "StackLoss":
    """Makes the loss of a model from its stack.

    Args:
        stack: The model as a sequence of blocks.
        execution: How the blocks run.

    Returns:
        `loss(params, model_state, batch, key)` for `zjax.Model`: the mean over the
        units of the head, plus auxiliary losses. The model state is unchanged.

    Raises:
        ModelError: Head and blocks give metrics of equal names, or a block gives totals
            that the segment does not declare; raised by the loss.
    """
    return StackLoss(stack, execution)


@dataclasses.dataclass(frozen=True, eq=False)
class StackLoss:
    """Loss of a stack, as `loss_of` describes it, without what `dropping` drops."""

    stack: Stack
    execution: Execution
    dropping: Dropping = NOTHING_DROPPED

    @dtype_promotion()
    def __call__(
        self,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        key: jax.Array | None,
    ) -> Loss:
        """Returns the loss of a microbatch."""
        stack = self.stack
        carry, auxiliaries = run_stack(
            stack, params, batch, loss_key(key), self.execution, self.dropping
        )
        combined = combine(auxiliaries)
        totals = stack_totals(stack.segments, auxiliaries)
        _, _, head = stack.split(params)
        total, weight, sums = stack.head(head, carry, batch)
        result = loss_of_sums(total, weight, sums, combined, totals)
        return result._replace(model_state=model_state)


def runs_stack(model: Model) -> bool:
    """Whether the loss of a model is the loss of the model's stack."""
    return isinstance(model.loss, StackLoss) and model.loss.stack is model.stack


def loss_of_step(model: Model, dropping: Dropping) -> Callable[..., Loss]:
    """Returns the loss of a model in a step that leaves out blocks or tokens."""
    if dropping == NOTHING_DROPPED:
        return model.loss
    assert isinstance(model.loss, StackLoss)  # or the step had been refused
    return dataclasses.replace(model.loss, dropping=dropping)


def with_stack(model: Model, **functions: Any) -> Model:
    """Changes functions of a model's stack, in `Model.stack` and `Model.loss` alike.

    A new head adds a loss term or a metric that acts on every mesh.

    Args:
        model: Model with a stack and the stack's loss, as `zjax.make_model` makes.
        **functions: Fields of `zjax.Stack`. A head, `head(params, carry, batch) ->
            (loss_sum, weight, metric_sums)`, may call `model.stack.head`, and
            `model.stack.factors` for `(hidden, matrix)`, with equal `params` and
            `carry`: logits [B, L, V] are `hidden @ matrix.T`.

    Returns:
        The changed model.

    Raises:
        ModelError: The model has no stack, or another loss than `loss_of(model.stack)`.

    Example:
        >>> from zjax import Config, make_model
        >>> model = make_model(Config())
        >>> def head(params, carry, batch):
        ...     loss, weight, metrics = model.stack.head(params, carry, batch)
        ...     return 2 * loss, weight, metrics | {"double_loss": 2 * loss}
        >>> with_stack(model, head=head).stack.head is head
        True
    """
    if model.stack is None or not runs_stack(model):
        problem = "is not the loss of a stack, whose functions could change"
        remedy = "give a model of zjax.make_model, or loss=zjax.loss_of(stack)"
        raise ModelError(Problem("model.loss", name_of_loss(model), problem, remedy))
    assert isinstance(model.loss, StackLoss)  # or `runs_stack` were false
    stack = dataclasses.replace(model.stack, **functions)
    loss = dataclasses.replace(model.loss, stack=stack)
    return dataclasses.replace(model, stack=stack, loss=loss)


def name_of_loss(model: Model) -> str:
    """Names the loss of a model for messages."""
    return getattr(model.loss, "__name__", type(model.loss).__name__)


def run_stack(
    stack: Stack,
    params: Params,
    batch: Batch,
    key: jax.Array | None,
    execution: Execution = ONE_BY_ONE,
    dropping: Dropping = NOTHING_DROPPED,
) -> tuple[Any, list[Auxiliary]]:
    """Runs the embedding and all blocks; returns the carry and a result per block.

    The embedding uses `fold_in(key, 0)`, block i of all segments `fold_in(key, i + 1)`;
    a key of None means evaluation.
    """
    embed, blocks, _ = stack.split(params)
    carry, context = stack.embed(embed, batch, fold_in(key, 0))
    num_blocks = sum(segment.num_blocks for segment in stack.segments)
    # 0 belongs to the embedding.
    keys = None if key is None else _fold_in(key, jnp.arange(1, num_blocks + 1))
    inner = inner_blocks(num_blocks, dropping, key)
    pieces, stream = _cut(stack, blocks, inner), (carry, [])
    for is_inner, group in itertools.groupby(pieces, lambda x: x.numbers[0] in inner):
        inputs = functools.partial(make_inputs, keys, of_block(dropping, is_inner))
        run = functools.partial(_run_pieces, stack, execution, [*group], inputs)
        if is_inner and dropping.once:
            run = on_span(run, stack, dropping, fold_in(key, 2))
        stream = run(stream, context)
    carry, auxiliaries = stream
    # Named, and so saved by policies, like the input of a block.
    carry = jax.tree.map(lambda x: remat.mark(x, remat.INPUT), carry)
    return carry, auxiliaries


class _Piece(NamedTuple):
    """Adjacent blocks of a segment, with the numbers of the blocks in the model."""

    segment: Segment
    numbers: range
    params: Params


def _cut(stack: Stack, blocks: Sequence[Params], inner: range) -> list[_Piece]:
    """Splits the blocks of each segment into blocks inside and outside of a range."""
    pieces, first = [], 0
    for segment, params in zip(stack.segments, blocks, strict=True):
        last = first + segment.num_blocks
        inside = {x for x in (inner.start, inner.stop) if first < x < last}
        ends = itertools.pairwise(sorted({first, last} | inside))
        ranges = list(itertools.starmap(range, ends))
        layers = cut_layers(params, [*map(len, ranges)])
        pieces += map(functools.partial(_Piece, segment), ranges, layers)
        first = last
    return pieces


def _run_pieces(
    stack: Stack,
    execution: Execution,
    pieces: Sequence[_Piece],
    inputs_of: Callable[..., BlockInput],
    stream: tuple[Any, list[Auxiliary]],
    context: Any,
) -> tuple[Any, list[Auxiliary]]:
    """Runs adjacent pieces, and adds the result of each block to the stream."""
    carry, auxiliaries = stream
    for piece in pieces:
        given = inputs_of(piece.numbers, carry)
        carry, added = _run_piece(stack, execution, piece, carry, context, given)
        auxiliaries = [*auxiliaries, *added]
    return carry, auxiliaries


def _run_piece(
    stack: Stack,
    execution: Execution,
    piece: _Piece,
    carry: Any,
    context: Any,
    given: BlockInput,
) -> tuple[Any, list[Auxiliary]]:
    """Runs the blocks of one piece, one by one or in a scan."""
    num_blocks = len(piece.numbers)
    size = execution.scan_size(num_blocks)
    block = remat.recompute(
        block_on_tokens(stack, piece.segment),
        execution.policy,
        in_loop=0 < size < num_blocks,  # a scan of one iteration compiles to no loop
        memory=execution.memory,
    )

    def step(params: Params, carry: Any, given: BlockInput) -> Any:
        return run_block(block, params, carry, context, given)

    def inputs_at(place: int) -> BlockInput:
        return jax.tree.map(lambda x: x[place::size] if size else x[place], given)

    inputs = tuple(map(inputs_at, range(size or num_blocks)))
    carry, outputs = run_blocks(step, piece.params, carry, inputs, scan_size=size)
    # Outputs come back by place in an iteration, and are put in the order of blocks.
    if size:
        outputs = [x for i in range(num_blocks // size) for x in _select(outputs, i)]
    return carry, list(outputs)


def _select(stacked: Any, iteration: int) -> Any:
    return jax.tree.map(lambda x: x[iteration], stacked)


def run_blocks(
    step: Callable[[Params, Any, Any], tuple[Any, Any]],
    blocks: Params,
    carry: Any,
    inputs: Sequence[Any],
    *,
    scan_size: int,
) -> tuple[Any, tuple[Any, ...]]:
    """Threads a carry through equal blocks by `step(params, carry, input)`.

    `blocks` stacks parameters, or is a `Layers`. `inputs` has one tree per block or,
    with a scan, one per block of an iteration, stacked over iterations; outputs have
    the form of the inputs.

    Example:
        >>> def step(params, x, key):
        ...     return params * x, x
        >>> last, seen = run_blocks(step, jnp.arange(1, 4), 2, (None,) * 3, scan_size=0)
        >>> int(last), [int(x) for x in seen]
        (12, [2, 2, 4])
    """

    def run_few(carry: Any, layers: Sequence[Params], inputs: Sequence[Any]) -> Any:
        outputs = []
        for params, block_input in zip(layers, inputs, strict=True):
            carry, output = step(params, carry, block_input)
            outputs.append(output)
        return carry, tuple(outputs)

    def run_group(carry: Any, xs: Any) -> Any:
        group, inputs = xs
        if scan_size == 1:
            return run_few(carry, [group], inputs)
        # The block slices the layer itself: slices taken here would be saved as
        # residuals, a copy of all layers.
        layers = [LayerOf(group, i) for i in range(scan_size)]
        return run_few(carry, layers, inputs)

    if scan_size == 0:
        return run_few(carry, layers_of(blocks, len(inputs)), inputs)
    if scan_size > 1:
        blocks = jax.tree.map(lambda x: x.reshape(-1, scan_size, *x.shape[1:]), blocks)
    return jax.lax.scan(run_group, carry, (blocks, tuple(inputs)))


def combine(
    auxiliaries: Sequence[Auxiliary], num_blocks: Sequence[int] | None = None
) -> Auxiliary:
    """Sums the losses of blocks, and averages each metric over blocks that return one.

    Results of `num_blocks[i]` equal blocks may be added up before.

    Example:
        >>> two, six = jnp.float32(2), jnp.float32(6)
        >>> both = combine([Auxiliary(two, {"x": six}), Auxiliary(six)], [3, 4])
        >>> float(both.loss), float(both.metrics["x"])
        (8.0, 2.0)
    """
    losses = [each.loss for each in auxiliaries if each.loss is not None]
    by_name = collections.defaultdict(list)
    numbers = num_blocks or [1] * len(auxiliaries)
    for each, number in zip(auxiliaries, numbers, strict=True):
        for name, x in each.metrics.items():
            by_name[name].append((x, number))
    return Auxiliary(
        functools.reduce(jnp.add, losses) if losses else None,
        {name: mean_metric(*zip(*x, strict=True)) for name, x in by_name.items()},
    )


def stack_totals(
    segments: Sequence[Segment], auxiliaries: Sequence[Auxiliary]
) -> Totals:
    """Stacks the totals of the blocks of each segment.

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
    """Names totals as metrics, with the segment's index where a name repeats.

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
    """Refuses totals of a block that differ from the segment's declared totals."""
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
    """Builds the loss of a microbatch from the head's sums and the blocks' auxiliaries.

    Example:
        >>> six, three, one = (jnp.float32(x) for x in (6, 3, 1))
        >>> loss = loss_of_sums(six, three, {}, Auxiliary(one))
        >>> float(loss.value), float(loss.metrics["auxiliary_loss"])
        (3.0, 1.0)
    """
    # A microbatch of padding has weight 0, and must give 0 instead of NaN.
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
    # Weights average microbatches; no gradient flows through an average's weights.
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return Loss(jnp.asarray(value, jnp.float32), weight, (), metrics, totals)


def _check_names_differ(some: Metrics, others: Metrics) -> None:
    """Refuses metrics of equal names."""
    problem, remedy = "is given twice, by blocks or head", "rename one of them"
    problems = [
        Problem(f"metrics/{name}", str(some[name].dtype), problem, remedy)
        for name in sorted(some.keys() & others.keys())
    ]
    if problems:
        raise ModelError(*problems)


def _fold_in(key: jax.Array, numbers: jax.Array) -> jax.Array:
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
