"""Plans: layouts prepared for the kernels on the host."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zjax_kernels.device import invalid, refuse
from zjax_kernels.sparse.arguments import integer_problems
from zjax_kernels.sparse.chunks import HALF, TILE, Cells, Mask
from zjax_kernels.sparse.layout import BlockLayout, check_layout
from zjax_kernels.sparse.schedule import Schedule, make_schedule, stack_schedules

MIN_COPY = 32
"""Fewest 4-byte numbers per copy into shared memory."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout prepared for the kernels: arrays, to be passed through `jax.jit`.

    Args:
        queries: Tiles of queries over keys, for the forward pass and dq.
        keys: Tiles of keys over queries, for dk and dv. The columns of a key head are
            the concatenated queries of all heads of the group.
        num_queries: Number of queries.
        num_keys: Number of keys.
    """

    queries: Schedule
    keys: Schedule
    num_queries: int = dataclasses.field(metadata={"static": True})
    num_keys: int = dataclasses.field(metadata={"static": True})


def make_plan(
    layout: BlockLayout,
    *,
    num_kv_heads: int | None = None,
    head_size: int = 128,
    segments: bool = False,
    mask: np.ndarray | Mask | None = None,
    head_shards: int = 1,
) -> Plan:
    """Prepares a layout for attention, on the host.

    Args:
        layout: Live blocks of each query head.
        num_kv_heads: Heads of keys and values; divides the heads of the layout.
        head_size: Channels per head, which sets the size of chunks.
        segments: Whether segments or a key mask will be given: blocks of 16 are then
            gathered in pairs.
        mask: bool[S, T], False for hidden pairs of query and key in live blocks; or a
            function from numbers of queries and of keys, NumPy arrays that broadcast,
            to bools. Blocks that are hidden entirely are not visited.
        head_shards: Devices over which heads are sharded; divides the key heads. If
            above 1, shard the first dim of every array of the plan, as by
            `jax.shard_map`.

    Returns:
        The plan.

    Raises:
        ValueError: The layout has a wrong type, the heads do not divide, or the mask
            has another shape.

    Example:
        >>> live = np.tri(8, dtype=bool)
        >>> layout = BlockLayout.from_dense(live, block=32, num_heads=4, causal=True)
        >>> plan = make_plan(layout, num_kv_heads=2)
        >>> plan.queries.columns.shape, plan.keys.head_patterns.shape
        ((3, 4), (2,))

        A window of 48 tokens, without an array:

        >>> near = make_plan(layout, mask=lambda query, key: query - key < 48)
    """
    check_layout(layout)
    _check(num_kv_heads, head_size)
    if head_shards != 1:
        shards = layout.split_heads(head_shards)
        num_kv_heads = split_kv_heads(layout, num_kv_heads, head_shards)
        given = {"num_kv_heads": num_kv_heads, "head_size": head_size, "mask": mask}
        # Equal shards are one object, with one plan.
        plans = {part: make_plan(part, segments=segments, **given) for part in shards}
        return stack_plans([plans[part] for part in shards])
    tokens = layout.num_rows * layout.block, layout.num_columns * layout.block
    evaluate = (
        None
        if mask is None
        else functools.partial(_evaluate, _mask_function(mask, tokens), tokens)
    )
    return plan_cells(
        [Cells.of(pattern, layout, evaluate) for pattern in layout.patterns],
        layout.head_patterns,
        tokens,
        block=layout.block,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        segments=segments,
    )


def split_kv_heads(
    layout: BlockLayout, num_kv_heads: int | None, head_shards: int
) -> int:
    """Returns the key heads of one device; refuses numbers that do not divide."""
    number = layout.num_heads if num_kv_heads is None else num_kv_heads
    if number % head_shards:
        problem = f"does not divide num_kv_heads={number}"
        raise invalid("head_shards", head_shards, problem, "use a divisor")
    return number // head_shards


def stack_plans(plans: Sequence[Plan]) -> Plan:
    """Stacks plans of several devices, to be sharded along the first dim."""
    queries, keys = (
        stack_schedules([getattr(plan, name) for plan in plans])
        for name in ("queries", "keys")
    )
    return dataclasses.replace(plans[0], queries=queries, keys=keys)


def device_plan(plan: Any) -> Any:
    """Returns the single plan of a stack; refuses a stack of several devices' plans."""
    # Items of one plan have 3 dims; a stack has one dim more.
    if not isinstance(plan, Plan) or plan.queries.items.ndim == 3:
        return plan
    number = len(plan.queries.items)
    if number > 1:
        problem = "are stacked in one plan"
        remedy = "split its arrays along their first dim, as by jax.shard_map"
        raise invalid("head_shards", number, problem, remedy)
    return jax.tree.map(lambda x: x[0], plan)


def check_plan(plan: object, *, head_size: int = 1, segmented: bool = False) -> None:
    """Refuses everything but a plan that the kernels can run.

    `segmented` says whether there are segments or a key mask.
    """
    if not isinstance(plan, Plan):
        remedy = "give make_plan(layout)"
        raise invalid("plan", type(plan).__name__, "is not a plan", remedy)
    if head_size > 128 and plan.queries.chunk > HALF:
        problem = "does not fit the plan, which is for up to 128 channels"
        remedy = (
            f"use make_plan(..., head_size={head_size}), or at most 128 channels with "
            "make_selected_plan"
        )
        raise invalid("head_size", head_size, problem, remedy)
    if segmented and min(plan.queries.column_unit, plan.keys.row_unit) < MIN_COPY:
        problem = "cannot be used with the plan, which gathers blocks one by one"
        remedy = "use make_plan(..., segments=True)"
        raise invalid("segment_ids or key_mask", "...", problem, remedy)


def plan_cells(
    patterns: Sequence[Cells],
    head_patterns: Sequence[int],
    tokens: tuple[int, int],
    *,
    block: int,
    num_kv_heads: int | None,
    head_size: int,
    segments: bool,
) -> Plan:
    """Makes a plan from live cells of each pattern, for `tokens` queries and keys."""
    _check(num_kv_heads, head_size)
    heads = len(head_patterns)
    num_kv_heads = heads if num_kv_heads is None else num_kv_heads
    if heads % num_kv_heads:
        raise invalid(
            "num_kv_heads",
            num_kv_heads,
            f"does not divide the {heads} heads of the layout",
            "give a divisor, or a layout with other heads",
        )
    group = heads // num_kv_heads
    groups = [
        tuple(head_patterns[first : first + group]) for first in range(0, heads, group)
    ]
    # Key heads share a pattern if the query heads of both have equal patterns.
    distinct = list(dict.fromkeys(groups))
    cell = patterns[0].size
    # Above 128 channels, two stages of 128 columns exceed shared memory.
    narrow = HALF if head_size > 128 else TILE
    # Segments are copied with the columns, 4 bytes a token.
    min_unit = MIN_COPY if segments else cell
    return Plan(
        queries=make_schedule(
            patterns,
            head_patterns,
            # `lse` and `delta` are copied by units of queries, 4 bytes a token.
            row_unit=max(cell, MIN_COPY),
            column_unit=max(min(block, narrow), min_unit),
            chunk=narrow,
            transposed=False,
        ),
        keys=make_schedule(
            [Cells.transposed([patterns[i] for i in each]) for each in distinct],
            [distinct.index(each) for each in groups],
            row_unit=max(cell, min_unit),
            # The columns are queries, with `lse` and `delta` again.
            column_unit=max(cell, MIN_COPY),
            # At 128 channels, dk, dv and scores of 128 columns exceed the registers.
            chunk=HALF,
            transposed=True,
        ),
        num_queries=tokens[0],
        num_keys=tokens[1],
    )


def _check(num_kv_heads, head_size):
    """Refuses numbers of heads or channels that are no positive integers."""
    found = (
        []
        if num_kv_heads is None
        else integer_problems("num_kv_heads", num_kv_heads, 1)
    )
    refuse(found + integer_problems("head_size", head_size, 1))


def _mask_function(mask: Any, tokens: tuple[int, int]) -> Any:
    """Returns a mask, which may be an array, as a function."""
    if callable(mask):
        return mask
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise invalid("mask.dtype", mask.dtype, "is not bool", "give True where seen")
    if mask.shape != tokens:
        problem = f"differs from the layout's tokens, {tokens}"
        raise invalid("mask.shape", mask.shape, problem, "give one for all tokens")
    return lambda queries, keys: mask[queries, keys]


def _evaluate(mask, tokens, queries, keys):
    """Evaluates a mask; padding tokens, in no live cell, repeat the last token."""
    keys = np.minimum(keys, tokens[1] - 1)
    found = np.asarray(mask(np.minimum(queries, tokens[0] - 1), keys))
    if found.dtype != bool:
        problem = "is what the function returns, not bool"
        raise invalid("mask.dtype", found.dtype, problem, "return True where seen")
    shape = np.broadcast_shapes(queries.shape, keys.shape)
    if not _broadcasts(found.shape, shape):
        problem = f"is what the function returns, and does not broadcast to {shape}"
        remedy = "return one for each pair of a query and a key"
        raise invalid("mask.shape", found.shape, problem, remedy)
    return found


def _broadcasts(found, shape):
    lengths = zip(found[::-1], shape[::-1], strict=False)
    return len(found) <= len(shape) and all(n in (1, size) for n, size in lengths)
