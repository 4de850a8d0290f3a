"""Memory of a device that a streamed step takes, from its programs and its streams."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.offload.segments import Segments
from zjax.offload.stream import GOING_SHARE, Stream
from zjax.offload.train import OffloadedTrain
from zjax.offload.units import units_by_block
from zjax.offload.whole import Whole
from zjax.sharding.batch import batch_shardings
from zjax.sharding.in_use import plan_on_device
from zjax.sharding.memory import resting_bytes
from zjax.sharding.placement import ArrayPlan, abstract_key, abstract_tree
from zjax.sharding.plan import DEVICE, Plan
from zjax.train.state import without_update
from zjax.typing import Batch, Entries


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes on one device at one moment of a step.

    Args:
        moment: The program that runs.
        parts: What is there, by name.
    """

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def predict_peak(train: OffloadedTrain, batch: Batch) -> Peak | None:
    """Compiles the programs of a step, without running them.

    Args:
        train: Its programs and streams.
        batch: Arrays or ShapeDtypeStructs of the global batch.

    Returns:
        The moment that takes most; None where a compiler does not say what its programs
        take.
    """
    passes = train.backward
    if isinstance(passes, Whole):
        return _peak_of_whole(train, passes, batch)
    found = _Programs(train, passes, batch)
    if None in found.bytes.values():
        return None
    return max(_moments(train, passes, found), key=lambda moment: moment.total)


def _moments(
    train: OffloadedTrain, passes: Segments, found: "_Programs"
) -> Iterator[Peak]:
    """What is on a device while each of the programs runs."""
    inputs = _resting_here(found.inputs)
    sums = passes.sum_rows if passes.num_microbatches > 1 else []
    always = {
        "resting": resting_bytes(passes.plan, DEVICE),
        "groups on their way": _on_their_way(train.stream, train.group_bytes),
        "sums of gradients": _resting_here(row for rows in sums for row in rows)
        + _on_their_way(passes.sums, [_moved_bytes(rows) for rows in sums]),
        "inputs on their way": _on_their_way(
            passes.carries, [_moved_bytes(found.inputs)]
        ),
        "pending gradients": _pending(train),
    }
    all_blocks = [*map(_moved_bytes, passes.blocks.unit_rows)]
    blocks = {"blocks on their way": _on_their_way(passes.blocks.stream, all_blocks)}
    waiting = _waiting(train, passes, inputs)
    # A gradient waits where its block kept something; that of the head comes before.
    first = min(waiting, sum(x.device_bytes for x in passes.sum_rows[passes.order[0]]))
    back = "what blocks keep, then gradients"
    streams = found.carry + found.for_tiles
    there = {
        "forward": blocks | {"what blocks keep": inputs},
        "head": blocks | {"what blocks keep": inputs + found.carry},
        "backward": blocks | {back: max(inputs + first, waiting) + streams},
        "embedding, backward": {"gradients": waiting + found.carry},
        "update": {"gradients": waiting},
    }
    if found.for_tiles:
        there["tile"] = blocks | {"what blocks keep": inputs + streams}
        there["tile, backward"] = there["backward"]
    for name, parts in there.items():
        yield Peak(name, always | parts | {"program": found.bytes[name] or 0})


class _Programs:
    """Bytes that the programs of a step add to their operands."""

    def __init__(self, train: OffloadedTrain, passes: Segments, batch: Batch):
        number = jax.ShapeDtypeStruct((), jnp.float32)
        self.plan = plan_on_device(passes.plan)
        params = abstract_tree(self.plan.compute)
        embed, _, head = passes.stack.split(params)
        batch = _like_batch(self.plan, batch, train.entries)
        part = _shapes_of(passes.split, batch, 0)
        part = _like_batch(self.plan, part, train.entries)
        key = abstract_key()
        carry, context = _shapes_of(passes.embed, embed, part, key)
        carry = _like_batch(self.plan, carry)
        units = units_by_block(passes.stack, params)
        first = dict(
            zip(passes.blocks.segment_by_block[::-1], units[::-1], strict=True)
        )
        reads = (carry, context, key)
        of_segment = {i: self.block(passes, i, first[i], *reads) for i in sorted(first)}
        blocks = [of_segment[i] for i in passes.blocks.segment_by_block]
        self.inputs = [row for block in blocks for row in block.rows]
        self.carry = self.bytes_of(carry)
        self.for_tiles = max(block.for_tiles for block in blocks)
        of_head = (head, carry, part, number, [block.given for block in blocks])
        shared = _shapes_of(passes.head, *of_head)[2]
        back = (embed, part, key, carry, shared)
        self.bytes = _most([block.bytes for block in of_segment.values()]) | {
            "head": _added_bytes(passes.head, *of_head),
            "embedding, backward": _added_bytes(passes.embed_backward, *back),
            "update": _update_bytes(train),
        }

    def block(
        self,
        passes: Segments,
        segment: int,
        units: Sequence[Any],
        carry: Any,
        context: Any,
        key: Any,
    ) -> "_Block":
        """The blocks of a segment, by its first."""
        trunk, *tiles = units
        inputs = (segment, trunk, carry, context, key, 0)
        stream, given, _ = _shapes_of(passes.block, *inputs)
        leaving = _like_batch(self.plan, stream)
        lowered = (passes.block_kept or passes.block).lower(*inputs)
        forward, left = lowered.compile(), carry
        if passes.block_kept is not None:
            _, left = _placed(lowered.out_info, forward.output_shardings)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        back = (segment, trunk, left, context, key, 0, *leaving, number)
        found = {
            "forward": _added_by(forward),
            "backward": _added_bytes(passes.block_backward, *back),
        }
        for tile in tiles[:1]:
            there = (segment, tile, *leaving, key, 0)
            back = (segment, tile, leaving[1], key, 0, *leaving)
            found |= {
                "tile": _added_bytes(passes.tile, *there),
                "tile, backward": _added_bytes(passes.tile_backward, *back),
            }
        rows = jax.tree.leaves(passes.rows_kept(left, leaving[1]))
        return _Block(rows, self.bytes_of(leaving[1]), given, found)

    def bytes_of(self, tree: Any) -> int:
        """Of shapes on one device."""
        return sum(_row_of(x).device_bytes for x in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block of a segment.

    Args:
        rows: Of what it leaves to the backward pass.
        for_tiles: Bytes of what its tiles read.
        given: Its auxiliary loss and metrics, as shapes.
        bytes: That its programs add to their operands.
    """

    rows: list[ArrayPlan]
    for_tiles: int
    given: Any
    bytes: dict[str, int | None]


def _most(found: Sequence[Mapping[str, int | None]]) -> dict[str, int | None]:
    """The most bytes of each program; None where a compiler does not say."""
    names = dict.fromkeys(name for own in found for name in own)
    every = {name: [own[name] for own in found if name in own] for name in names}
    known = {n: [x for x in own if x is not None] for n, own in every.items()}
    return {n: max(x) if len(x) == len(every[n]) else None for n, x in known.items()}


def _peak_of_whole(train: OffloadedTrain, passes: Whole, batch: Batch) -> Peak | None:
    state = without_update(abstract_tree(train.state_rows))
    batch = _like_batch(passes.plan, batch, train.entries)
    args = (state, batch, abstract_key())
    added = _added_bytes(passes.gradients, *args), _update_bytes(train)
    if None in added:
        return None
    always = {
        "resting": resting_bytes(passes.plan, DEVICE),
        "groups on their way": _on_their_way(train.stream, train.group_bytes),
    }
    grads = sum(row.device_bytes for row in jax.tree.leaves(passes.grad_rows))
    moments = (
        Peak("gradients", always | {"program": added[0] or 0}),
        Peak("update", always | {"gradients": grads, "program": added[1] or 0}),
    )
    return max(moments, key=lambda moment: moment.total)


def _update_bytes(train: OffloadedTrain) -> int | None:
    found = [_added_bytes(*call) for call in train.update.abstract_calls()]
    return max((x for x in found if x is not None), default=None)


def _like_batch(plan: Plan, tree: Any, entries: Entries | None = None) -> Any:
    """Shapes, placed as a batch is, or as what follows from one."""
    return _placed(tree, batch_shardings(plan, tree, entries or {}))


def _shapes_of(program: Any, *args: Any) -> Any:
    return program.lower(*args).out_info


def _placed(shapes: Any, places: Any) -> Any:
    """Shapes with their places."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        places,
    )


def _added_bytes(program: Any, *args: Any) -> int | None:
    return _added_by(program.lower(*args).compile())


def _added_by(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return results + analysis.temp_size_in_bytes


def _row_of(x: Any) -> ArrayPlan:
    return ArrayPlan("", x.shape, x.dtype, x.sharding, x.sharding)


def _resting_here(rows: Iterable[ArrayPlan]) -> int:
    return sum(row.device_bytes for row in rows if row.memory == DEVICE)


def _moved_bytes(rows: Iterable[ArrayPlan]) -> int:
    return sum(row.device_bytes for row in rows if row.memory != DEVICE)


def _on_their_way(stream: Stream, loads: list[int]) -> int:
    """Most that a stream holds: one load, or as many as there is room for."""
    return max(max(loads, default=0), min(stream.limit, sum(loads)))


def _pending(train: OffloadedTrain) -> int:
    """Gradients of the last step on the device, as those of this one come."""
    if train.delay_from < 0:
        return 0
    going = _moved_bytes(train.resting_grads)
    here = _resting_here(train.resting_grads)
    return here + min(going, train.stream.limit // GOING_SHARE)


def _waiting(train: OffloadedTrain, passes: Segments, inputs: int) -> int:
    """Gradients that wait on the device for a number of all of them."""
    if not train.update.waits or train.delay_from >= 0:
        return 0
    rows = jax.tree.leaves(passes.grad_rows)
    everything = sum(row.device_bytes for row in rows)
    if _moved_bytes(train.resting_grads) == 0:
        return 0 if passes.num_microbatches > 1 else everything  # sums wait as they are
    going = train.stream.limit // GOING_SHARE
    moving = _on_their_way(train.stream, train.group_bytes)
    beside_state = everything * moving // max(1, sum(train.group_bytes))
    return min(everything, inputs + going + beside_state)
