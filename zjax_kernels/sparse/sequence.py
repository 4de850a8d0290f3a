"""Sparse attention of sequences sharded over devices that exchange blocks.

Each device holds consecutive queries and keys. The plan lists the key blocks that each
device lacks, so a sliding window costs a halo exchange, and a global block one send to
each device. All devices receive as many blocks per distance as the neediest one: a row
that sees every block makes all devices hold all keys.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zjax_kernels.device import invalid, refuse
from zjax_kernels.sparse.api import sparse_attention
from zjax_kernels.sparse.arguments import integer_problems
from zjax_kernels.sparse.chunks import TILE, Cells
from zjax_kernels.sparse.layout import BlockLayout, check_layout
from zjax_kernels.sparse.plan import Plan, plan_cells, split_kv_heads, stack_plans


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequencePlan:
    """Plans of all devices; shard the first dim of every array over the devices.

    Arrays of `plan` have one entry per sequence shard and head shard, arrays of `sends`
    have one per sequence shard.

    Args:
        plan: Stack of one plan per device; if heads are sharded, too, one per sequence
            shard and head shard, in this order.
        sends: int32[devices, blocks] per distance: blocks that a device sends to the
            device `distance` places later.
        distances: Distance of each of `sends`.
        receivers: Devices that need any of the sent blocks, per distance.
        block: Tokens per block.
        num_devices: Devices along the sequence.
    """

    plan: Plan
    sends: tuple[jax.Array | np.ndarray, ...]
    distances: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    receivers: tuple[tuple[int, ...], ...] = dataclasses.field(
        metadata={"static": True}
    )
    block: int = dataclasses.field(metadata={"static": True})
    num_devices: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks_sent(self) -> int:
        """Most blocks that a device sends, over all distances."""
        return sum(send.shape[-1] for send in self.sends)


def make_sequence_plan(
    layout: BlockLayout,
    num_devices: int,
    *,
    num_kv_heads: int | None = None,
    head_size: int = 128,
    segments: bool = False,
    head_shards: int = 1,
) -> SequencePlan:
    """Prepares a layout for a sequence that is sharded over devices.

    Args:
        layout: Live blocks of the global sequence, square.
        num_devices: Devices along the sequence; divides the blocks.
        num_kv_heads: Heads of keys and values; divides the heads of the layout.
        head_size: Channels per head.
        segments: Whether segments or a key mask will be given.
        head_shards: Devices over which heads are sharded, as in `make_plan`; shard
            `plan.plan` over both axes, the sequence axis first.

    Returns:
        The plan, of NumPy arrays.

    Raises:
        ValueError: The layout has a wrong type, or the sequence or heads do not divide.

    Example:
        >>> from zjax_kernels.sparse.patterns import BigBird
        >>> rule = BigBird(2, 64, attention="unidirectional", num_random_blocks=0)
        >>> make_sequence_plan(rule.layout(4096), 4).num_blocks_sent
        4
    """
    check_layout(layout)
    refuse(integer_problems("num_devices", num_devices, 1))
    tokens = layout.num_rows * layout.block // num_devices
    if layout.num_rows != layout.num_columns or layout.num_rows % num_devices:
        shape = layout.num_rows, layout.num_columns
        problem = f"blocks do not divide into {num_devices} equal parts of a sequence"
        raise invalid("layout", shape, problem, "use a length that divides")
    if tokens % TILE:
        problem = f"leave {tokens} tokens to a device, no multiple of {TILE}"
        raise invalid("num_devices", num_devices, problem, "use fewer devices")
    per_device = layout.num_rows // num_devices
    needs = _needed_blocks(layout, num_devices, per_device)
    distances = [d for d in range(1, num_devices) if any(len(x) for x in needs[d])]
    # One program runs on all devices: shapes are of the device with most needs.
    widths = {d: max(map(len, needs[d])) for d in distances}
    shards = [
        (shard, [Cells.of(pattern, layout) for pattern in shard.patterns])
        for shard in layout.split_heads(head_shards)
    ]
    num_kv_heads = split_kv_heads(layout, num_kv_heads, head_shards)
    plans = [
        plan_cells(
            [
                _device_cells(x, layout, device, per_device, needs, widths)
                for x in cells
            ],
            shard.head_patterns,
            (tokens, (per_device + sum(widths.values())) * layout.block),
            block=layout.block,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            segments=segments,
        )
        for device in range(num_devices)
        for shard, cells in shards
    ]
    # `% per_device`: from blocks of the sequence to those of the sender.
    return SequencePlan(
        stack_plans(plans),
        tuple(_blocks_to_send(needs[d], d, widths[d]) % per_device for d in distances),
        tuple(distances),
        tuple(
            tuple(device for device, blocks in enumerate(needs[d]) if len(blocks))
            for d in distances
        ),
        layout.block,
        num_devices,
    )


def _needed_blocks(layout, num_devices, per_device):
    """Returns, by distance, the blocks that each device needs of an earlier device."""
    seen = np.zeros((num_devices, layout.num_columns), bool)
    # One exchange of blocks serves all heads.
    for pattern in layout.patterns:
        seen[pattern.rows // per_device, pattern.columns] = True

    def of_device(device, distance):
        first = (device - distance) % num_devices * per_device
        return np.flatnonzero(seen[device, first : first + per_device]) + first

    return {
        distance: [of_device(device, distance) for device in range(num_devices)]
        for distance in range(1, num_devices)
    }


def _blocks_to_send(needs, distance, width):
    """Returns the blocks that each device sends over a distance, padded with 0."""
    sends = np.zeros((len(needs), width), np.int32)
    for receiver, blocks in enumerate(needs):
        sender = (receiver - distance) % len(needs)
        # Padding sends block 0, which no cell of the receiver reads.
        sends[sender, : len(blocks)] = blocks
    return sends


def _device_cells(cells, layout, device, per_device, needs, widths):
    """Returns cells of a device's queries, over local and received keys."""
    position = np.zeros(layout.num_columns, np.int64)
    first = device * per_device
    position[first : first + per_device] = np.arange(per_device)
    start = per_device
    for distance, width in widths.items():
        blocks = needs[distance][device]
        position[blocks] = start + np.arange(len(blocks))
        start += width
    fine = layout.block // cells.size
    local = cells.rows // fine // per_device == device
    columns = cells.columns[local]
    return dataclasses.replace(
        cells,
        rows=cells.rows[local] - first * fine,
        columns=position[columns // fine] * fine + columns % fine,
        diagonal=cells.diagonal[local],
        masked=cells.masked[local],
        num_rows=per_device * fine,
        # Up to a whole tile; no cell lives in the padding.
        num_columns=-(-start * layout.block // TILE) * (TILE // cells.size),
    )


def _axis_size(axis):
    """Returns the size of a mesh axis; refuses names outside of the program."""
    try:
        return lax.axis_size(axis)
    except NameError:
        remedy = "call it inside jax.shard_map over a mesh that has it"
        raise invalid(
            "axis", repr(axis), "is not an axis of this program", remedy
        ) from None


def sequence_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: SequencePlan,
    *,
    axis: str,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    key_mask: jax.Array | None = None,
    **options: Any,
) -> Any:
    """Computes `sparse_attention` of a sequence that is sharded over a mesh axis.

    Call it inside `jax.shard_map`, with the plan sharded as `SequencePlan` describes.

    Args:
        q: [B, S / devices, H, D] local queries.
        k: [B, S / devices, K, D] local keys.
        v: [B, S / devices, K, D] local values.
        plan: Plan from `make_sequence_plan`, for the size of `axis`.
        axis: Name of the mesh axis.
        segment_ids: int32[B, S / devices] twice, of the local queries and keys.
        key_mask: bool[B, S / devices], False for local keys that no query sees.
        **options: As in `sparse_attention`.

    Returns:
        Result of `sparse_attention`, for the local queries.

    Raises:
        ValueError: `plan` is not a SequencePlan or is for another number of devices,
            or there is no such axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from zjax_kernels.sparse.patterns import BigBird
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("sequence",))
        >>> plan = make_sequence_plan(BigBird(2, 64).layout(512), mesh.size)
        >>> split = P(None, "sequence")
        >>> attend = jax.shard_map(
        ...     lambda *given: sequence_attention(*given, axis="sequence"),
        ...     mesh=mesh,
        ...     in_specs=(split, split, split, P("sequence")),
        ...     out_specs=split,
        ...     check_vma=False,
        ... )
        >>> x = jnp.ones((1, 512, 2, 8))
        >>> jax.jit(attend)(x, x, x, plan).shape
        (1, 512, 2, 8)
    """
    if not isinstance(plan, SequencePlan):
        problem, remedy = "is not a plan of a sequence", "give make_sequence_plan(...)"
        raise invalid("plan", type(plan).__name__, problem, remedy)
    num_devices, given = _axis_size(axis), plan.num_devices
    if given != num_devices:
        problem = f"is not that of axis {axis!r}, {num_devices}"
        raise invalid("num_devices", given, problem, "make a plan for it")
    if len(plan.plan.queries.items) != 1:
        problem, remedy = (
            "are stacked in one plan",
            "split its arrays along their first dim",
        )
        raise invalid("num_devices", num_devices, problem, remedy)
    local = jax.tree.map(lambda x: x[0], plan)

    halo = _Halo(axis, num_devices, plan.distances, plan.receivers, plan.block)
    if segment_ids is not None:
        segment_ids = segment_ids[0], _gather(halo, segment_ids[1], local.sends)
    if key_mask is not None:
        key_mask = _gather(halo, key_mask, local.sends)
    return sparse_attention(
        q,
        _gather(halo, k, local.sends),
        _gather(halo, v, local.sends),
        local.plan,
        segment_ids=segment_ids,
        key_mask=key_mask,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class _Halo:
    """Exchange of blocks between devices; gradients take the reverse way."""

    axis: str
    size: int
    distances: tuple[int, ...]
    receivers: tuple[tuple[int, ...], ...]
    block: int

    def split_blocks(self, x):
        return x.reshape(x.shape[0], -1, self.block, *x.shape[2:])

    def send(self, x, nth):
        return lax.ppermute(x, self.axis, self._moves(nth))

    def send_back(self, x, nth):
        moves = [(receiver, sender) for sender, receiver in self._moves(nth)]
        return lax.ppermute(x, self.axis, moves)

    def _moves(self, nth):
        distance = self.distances[nth]
        # Devices that lack no block are left out, and get zeros from `ppermute`.
        return [((to - distance) % self.size, to) for to in self.receivers[nth]]


# A rule of gradients, as transposes of JAX would add in the dtype of x.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(halo, x, sends):
    """Appends the received blocks to the local blocks."""
    blocks = halo.split_blocks(x)
    received = [halo.send(blocks[:, send], nth) for nth, send in enumerate(sends)]
    blocks = jnp.concatenate([blocks, *received], axis=1)
    return blocks.reshape(x.shape[0], -1, *x.shape[2:])


def _gather_forward(halo, x, sends):
    return _gather(halo, x, sends), sends


def _gather_backward(halo, sends, gradient):
    """Sums gradients of local blocks in float32: many devices may see one block."""
    blocks = halo.split_blocks(gradient)
    widths = [send.shape[0] for send in sends]
    starts = np.cumsum([blocks.shape[1] - sum(widths), *widths])
    total = blocks[:, : starts[0]].astype(jnp.float32)
    for nth, (send, start) in enumerate(zip(sends, starts, strict=False)):
        found = halo.send_back(blocks[:, start : start + send.shape[0]], nth)
        total = total.at[:, send].add(found.astype(jnp.float32))
    total = total.reshape(gradient.shape[0], -1, *gradient.shape[2:])
    return total.astype(gradient.dtype), None


_gather.defvjp(_gather_forward, _gather_backward)
