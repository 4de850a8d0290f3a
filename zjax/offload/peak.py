"""Memory of a device that a streamed step takes, from its programs and its streams."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zjax.offload.segments import Segments
from zjax.offload.stream import GOING_SHARE, Stream
from zjax.offload.train import OffloadedTrain
from zjax.offload.units import units_of
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
    all_blocks = [*map(_moved_bytes, passes.unit_rows)] * passes.segment.num_blocks
    blocks = {"blocks on their way": _on_their_way(passes.stream, all_blocks)}
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
        embed, (blocks,), head = passes.stack.split(abstract_tree(self.plan.compute))
        batch = _like_batch(self.plan, batch, train.entries)
        part = _shapes_of(passes.split, batch, 0)
        part = _like_batch(self.plan, part, train.entries)
        key = abstract_key()
        carry, context = _shapes_of(passes.embed, embed, part, key)
        carry = _like_batch(self.plan, carry)
        trunk, *tiles = units_of(passes.segment, blocks[0])
        inputs = (trunk, carry, context, key, 0, number)
        leaving = _like_batch(self.plan, _shapes_of(passes.block, *inputs)[0])
        lowered = (passes.block_kept or passes.block).lower(*inputs)
        forward, left = lowered.compile(), carry
        if passes.block_kept is not None:
            _, left = _placed(lowered.out_info, forward.output_shardings)
        shared = _shapes_of(passes.head, head, carry, part, number, number)[2]
        self.carry = self.bytes_of(carry)
        self.for_tiles = self.bytes_of(leaving[1])
        rows = jax.tree.leaves(passes.rows_kept(left, leaving[1]))
        self.inputs = rows * len(blocks)
        self.bytes = {
            "forward": _added_by(forward),
            "head": _added_bytes(passes.head, head, carry, part, number, number),
            "backward": _added_bytes(
                passes.block_backward, trunk, left, context, key, 0, *leaving, number
            ),
            "embedding, backward": _added_bytes(
                passes.embed_backward, embed, part, key, carry, shared
            ),
            "update": _update_bytes(train),
        }
        for tile in tiles[:1]:
            back = (tile, leaving[1], key, 0, *leaving)
            self.bytes |= {
                "tile": _added_bytes(passes.tile, tile, *leaving, key, 0),
                "tile, backward": _added_bytes(passes.tile_backward, *back),
            }

    def bytes_of(self, tree: Any) -> int:
        """Of shapes on one device."""
        return sum(_row_of(x).device_bytes for x in jax.tree.leaves(tree))


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
