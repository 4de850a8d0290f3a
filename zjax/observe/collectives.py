"""What a compiled program sends between devices, counted from its text.

Two conventions, never mixed. Volume, as the ZeRO paper has it, counts elements: an
all-reduce of X elements moves 2 X, everything else X. Bytes sent are those of one
device in a ring of n: (n - 1) / n of the full buffer, twice that for an all-reduce.
"""

import collections
import dataclasses

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
"""What is counted; a `send` and its `recv` are not."""
_COMPUTE = (
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "while",
    "conditional",
    "call",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that communicates, or its part of one dtype.

    Args:
        op: One of `OPS`.
        dtype: As HLO writes it, such as `bf16`.
        elements: Of the full buffer: what enters an all-reduce or a reduce-scatter,
            what leaves the others; members of a tuple together.
        groups: Devices that communicate, as positions in the order that the program
            was compiled for; pairs of sender and receiver for a permutation.
        times: How often a run of the program executes it. Of a conditional the branch
            that sends more is counted.
        is_bounded: Whether the compiler knew the turns of every loop around it; one
            turn is counted where not.
        overlap: Instructions that compute between its start and its end in the
            schedule; None where it is not asynchronous.
        op_name: Where in the Python program it comes from.
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
        """Of the full buffer, in one execution."""
        return self.elements * hlo.dtype_bits(self.dtype) // 8

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a run of the program."""
        if self.op == "collective-permute":
            return float(self.times * self.num_bytes)
        n, passes = self.group_size, 2 if self.op == "all-reduce" else 1
        return self.times * self.num_bytes * passes * (n - 1) / n

    @property
    def volume(self) -> int:
        """Elements that a run of the program moves, by the paper's convention."""
        passes = 2 if self.op == "all-reduce" else 1
        return self.times * self.elements * passes


@dataclasses.dataclass(frozen=True)
class _Context:
    """What surrounds the instructions of a computation."""

    times: int = 1
    is_bounded: bool = True
    overlap: int | None = None


def list_collectives(text: str) -> list[Collective]:
    """Finds what a program communicates.

    Args:
        text: Optimised HLO, as `jax.stages.Compiled.as_text` prints it. A start and its
            end count once; loops count as often as they turn.

    Returns:
        One entry per instruction and dtype, in the order of the schedule.

    Example:
        >>> import jax
        >>> compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
        >>> list_collectives(compiled.as_text())
        []
    """
    module = hlo.parse_module(text)
    return _of_computation(module, module.entry, _Context())


def mesh_axes(groups: hlo.Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh along which devices communicate.

    Args:
        groups: Positions in the order of the mesh's devices.
        mesh: The mesh of the program.

    Returns:
        Names of the axes on which members of a group differ, in mesh order.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("data", "tensor"))
        >>> mesh_axes(((0, 1), (2, 3)), mesh), mesh_axes(((0, 4), (1, 5)), mesh)
        (('tensor',), ('data',))
    """
    differs = np.zeros(len(mesh.axis_names), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, tuple(mesh.shape.values())))
        differs |= (places != places[:, :1]).any(axis=1)
    pairs = zip(mesh.axis_names, differs, strict=True)
    return tuple(name for name, does in pairs if does)


def _of_computation(
    module: hlo.Module, name: str, context: _Context
) -> list[Collective]:
    found: list[Collective] = []
    body = module.computations[name]
    for index, instruction in enumerate(body):
        inside = context
        if instruction.opcode == "while":
            turns = instruction.trip_count
            inside = dataclasses.replace(
                context,
                times=context.times * (1 if turns is None else turns),
                is_bounded=context.is_bounded and turns is not None,
            )
        if instruction.opcode.endswith("-start"):
            inside = dataclasses.replace(context, overlap=_overlap(body, index))
        if instruction.opcode.removesuffix("-start") in OPS:
            found += _of_instruction(module, instruction, inside)
            continue
        parts = [_of_computation(module, c, inside) for c in instruction.called]
        if instruction.opcode == "conditional":
            parts = [max(parts, key=lambda part: sum(c.wire_bytes for c in part))]
        found += [collective for part in parts for collective in part]
    return found


def _of_instruction(
    module: hlo.Module, instruction: hlo.Instruction, context: _Context
) -> list[Collective]:
    op = instruction.opcode.removesuffix("-start")
    groups = hlo.device_groups(instruction.rest, module.num_partitions)
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
    """The type of what comes out; that of a start is (operands, results, ...)."""
    members = hlo.tuple_members(instruction.shape)
    is_pair = members[0].startswith("(") or instruction.opcode in (
        "all-gather-start",
        "collective-permute-start",
    )
    return members[1] if is_pair else instruction.shape


def _overlap(body: list[hlo.Instruction], start: int) -> int:
    work = 0
    for instruction in body[start + 1 :]:
        is_done = instruction.opcode.endswith("-done")
        if is_done and body[start].name in instruction.operands:
            return work
        work += instruction.opcode in _COMPUTE
    return 0
