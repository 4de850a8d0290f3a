"""Lists the collectives of a compiled program, and counts bytes, from HLO text.

Two units, never mixed. Volume counts elements as the ZeRO paper does: 2 X for an
all-reduce of X elements, X for every other collective. Wire bytes are the bytes that
one device sends in a ring of n: (n - 1) / n of the full buffer, twice as many for an
all-reduce.
"""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zjax.observe import hlo

OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Opcodes that are counted; `send` and `recv` are not."""
_COMPUTE_OPS = (
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "while",
    "conditional",
    "call",
)
"""Opcodes of work that may hide a collective."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collective instruction, restricted to one dtype.

    Args:
        op: Opcode, one of `OPS`.
        dtype: HLO name, such as `bf16`.
        elements: Elements of the full buffer: the input of an all-reduce or
            reduce-scatter, else the output; summed over the members of a tuple.
        groups: Groups of communicating devices, as positions in the device order of the
            program; pairs of sender and receiver for a permutation.
        times: Executions per run of the program. Of a conditional, only the branch that
            sends most is counted.
        is_bounded: Whether the trip count of every enclosing loop is known; an unknown
            one counts as 1.
        overlap: Compute instructions scheduled between start and end; None for a
            synchronous collective.
        op_name: Place in the Python program.
    """

    op: str
    dtype: str
    elements: int
    groups: hlo.Groups
    times: int
    is_bounded: bool
    overlap: int | None
    op_name: str

    @property
    def group_size(self) -> int:
        """Devices in the largest group; 2 for a permutation."""
        return max(map(len, self.groups), default=1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full buffer, in one execution."""
        return self.elements * hlo.dtype_bits(self.dtype) // 8

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per run of the program."""
        # Each sender sends the buffer once, whatever the number of devices.
        if self.op == "collective-permute":
            return float(self.times * self.num_bytes)
        n, passes = self.group_size, 2 if self.op == "all-reduce" else 1
        return self.times * self.num_bytes * passes * (n - 1) / n

    @property
    def volume(self) -> int:
        """Elements moved per run of the program, by the paper's convention."""
        # An all-reduce counts as a reduce-scatter and an all-gather.
        passes = 2 if self.op == "all-reduce" else 1
        return self.times * self.elements * passes


@dataclasses.dataclass(frozen=True)
class _Context:
    """Loops and asynchronous operations around a computation."""

    times: int = 1
    is_bounded: bool = True
    overlap: int | None = None


def list_collectives(text: str) -> list[Collective]:
    """Lists collectives in optimised HLO, one entry per instruction and dtype."""
    module = hlo.parse_module(text)
    return _list_in_computation(module, module.entry, _Context())


def mesh_axes(groups: hlo.Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Names of the mesh axes along which groups of devices communicate."""
    differs = np.zeros(len(mesh.axis_names), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(group, tuple(mesh.shape.values())))
        differs |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(np.array(mesh.axis_names)[differs].tolist())


def bytes_leaving_node(
    collectives: Iterable[Collective], mesh: Mesh | AbstractMesh, axis: str
) -> float:
    """Bytes that one node sends to other nodes per run of the program."""
    shape, dim = tuple(mesh.shape.values()), mesh.axis_names.index(axis)

    def of_group(each: Collective, group: tuple[int, ...]) -> float:
        nodes = np.unravel_index(group, shape)[dim]
        # Nodes are alike: node 0 stands for any node.
        inside = int((nodes == 0).sum())
        outside = len(group) - inside
        if not inside or not outside:
            return 0.0
        if each.op == "collective-permute":
            return each.wire_bytes * (nodes[0] == 0)
        if each.op in ("all-to-all", "ragged-all-to-all"):
            # Each device inside sends the shares of all devices outside.
            return each.times * each.num_bytes * inside * outside / len(group)
        # A ring leaves a node once, with the bytes that one device sends.
        return each.wire_bytes

    return sum(of_group(each, group) for each in collectives for group in each.groups)


def bytes_inside_node(
    collectives: Iterable[Collective], mesh: Mesh | AbstractMesh, axis: str
) -> float:
    """Bytes that devices of one node send one another per run of the program.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("replica", "data"))
        >>> groups = (tuple(range(8)),)
        >>> each = Collective("all-gather", "f16", 80, groups, 1, True, None, "")
        >>> bytes_inside_node([each], mesh, "replica")
        420.0
    """
    collectives = list(collectives)
    shape, dim = tuple(mesh.shape.values()), mesh.axis_names.index(axis)

    def of_group(each: Collective, group: tuple[int, ...]) -> float:
        nodes = np.unravel_index(group, shape)[dim]
        is_pair = each.op == "collective-permute"
        # Of a pair, only the first device sends.
        senders = nodes[:1] if is_pair else nodes
        return each.wire_bytes * float((senders == 0).sum())

    sent = sum(of_group(each, group) for each in collectives for group in each.groups)
    return sent - bytes_leaving_node(collectives, mesh, axis)


def _list_in_computation(
    module: hlo.Module, name: str, context: _Context
) -> list[Collective]:
    """Lists collectives of a computation and of the computations it calls."""
    collectives: list[Collective] = []
    body = module.computations[name]
    for index, instruction in enumerate(body):
        inner = context
        if instruction.opcode == "while":
            trip_count = instruction.trip_count
            inner = dataclasses.replace(
                context,
                times=context.times * (1 if trip_count is None else trip_count),
                is_bounded=context.is_bounded and trip_count is not None,
            )
        if instruction.opcode.endswith("-start"):
            # Also for collectives that an asynchronous start wraps in a computation.
            inner = dataclasses.replace(context, overlap=_overlap(body, index))
        if instruction.opcode.removesuffix("-start") in OPS:
            collectives += _list_in_instruction(module, instruction, inner)
            continue
        called = [_list_in_computation(module, c, inner) for c in instruction.called]
        if instruction.opcode == "conditional":
            # One branch runs: the most expensive one counts.
            called = [max(called, key=lambda branch: sum(c.wire_bytes for c in branch))]
        collectives += [collective for branch in called for collective in branch]
    return collectives


def _list_in_instruction(
    module: hlo.Module, instruction: hlo.Instruction, context: _Context
) -> list[Collective]:
    """Returns one entry for each dtype in the result of a collective."""
    op = instruction.opcode.removesuffix("-start")
    text = instruction.operands_and_attributes
    groups = hlo.device_groups(text, module.num_partitions)
    # The result of a reduce-scatter is a shard; `elements` counts the full buffer.
    inputs_per_output = max(map(len, groups)) if op == "reduce-scatter" else 1
    elements: dict[str, int] = collections.Counter()
    for dtype, size in hlo.shape_arrays(_result_shape(instruction)):
        elements[dtype] += size * inputs_per_output
    return [
        Collective(
            op=op,
            dtype=dtype,
            elements=size,
            groups=groups,
            op_name=instruction.op_name,
            **vars(context),
        )
        for dtype, size in elements.items()
    ]


def _result_shape(instruction: hlo.Instruction) -> str:
    """Type of the result; an asynchronous start has (operands, results, ...)."""
    members = hlo.tuple_members(instruction.shape)
    is_pair = members[0].startswith("(") or instruction.opcode in (
        "all-gather-start",
        "collective-permute-start",
    )
    return members[1] if is_pair else instruction.shape


def _overlap(body: list[hlo.Instruction], start: int) -> int:
    """Number of compute instructions between a start and the matching end."""
    work = 0
    for instruction in body[start + 1 :]:
        is_done = instruction.opcode.endswith("-done")
        if is_done and body[start].name in instruction.operands:
            return work
        work += instruction.opcode in _COMPUTE_OPS
    return 0  # no end in this computation
