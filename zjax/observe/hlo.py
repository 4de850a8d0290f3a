"""Parses optimised HLO: computations, instructions, shapes and device groups."""

import dataclasses
import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) "
    r"(?P<opcode>[a-z][a-z0-9\-]*)\((?P<operands_and_attributes>.*)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
"""Groups as lists of devices, such as {{0,1},{2,3}}."""
_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
"""Groups as a transposed grid, such as [2,2]<=[2,2]T(1,0)."""
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?|[\d,{}]+)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
"""Groups along axes of a mesh, such as mesh['a'=2,'b'=2] {'b'}."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction of a computation.

    Args:
        shape: Type of the result as text.
        operands_and_attributes: Text after the opening parenthesis.
    """

    name: str
    shape: str
    opcode: str
    operands_and_attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        operands, _, _ = self.operands_and_attributes.partition(")")
        return re.findall(r"%([\w.\-]+)", operands)

    @property
    def called(self) -> list[str]:
        """Names of called computations: bodies, conditions, branches."""
        matches = _CALLED.findall(self.operands_and_attributes)
        names = [one or several for one, several in matches]
        return [name.strip(" %") for text in names for name in text.split(",")]

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None if the compiler does not know the number."""
        match = _TRIP_COUNT.search(self.operands_and_attributes)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        """Place in the Python program; empty if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.operands_and_attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """Compiled program.

    Args:
        computations: Instructions by name of the computation, in schedule order if
            scheduled.
        num_partitions: Number of devices of the program.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    num_partitions: int


def parse_module(text: str) -> Module:
    """Parses the text that `jax.stages.Compiled.as_text` returns."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        header = _HEADER.fullmatch(line.rstrip())
        instruction = None if header else _INSTRUCTION.match(line)
        if header:
            body = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif instruction:
            body.append(Instruction(**instruction.groupdict()))
    # The first line holds the attributes of the module.
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module(computations, entry, int(devices[1]) if devices else 1)


def shape_arrays(shape: str) -> list[tuple[str, int]]:
    """Dtype and number of elements of each array in a type, without tokens.

    Example:
        >>> shape_arrays("(bf16[2,8]{1,0:T(8,128)S(1)}, (u32[], token[]))")
        [('bf16', 16), ('u32', 1)]
    """
    return [
        # `<=8` is a dynamic dim, counted by its bound.
        (dtype, math.prod(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(shape)
        if dtype != "token"
    ]


def tuple_members(shape: str) -> list[str]:
    """Splits a tuple type into members; an array type is returned alone.

    Example:
        >>> tuple_members("((f32[4]{0}, s32[]), f32[1,4]{1,0})")
        ['(f32[4]{0}, s32[])', 'f32[1,4]{1,0}']
    """
    if not shape.startswith("("):
        return [shape]
    members, depth = [""], 0
    for letter in shape[1:-1]:
        # Layouts and nested tuples contain commas as well.
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            members.append("")
        else:
            members[-1] += letter
    return [member.strip() for member in members]


def dtype_bits(dtype: str) -> int:
    """Bits per element of an HLO dtype.

    Example:
        >>> [dtype_bits(name) for name in ("bf16", "f8e4m3fn", "s4", "pred")]
        [16, 8, 4, 8]
    """
    digits = re.search(r"\d+", dtype)
    # `pred` has no digits and takes a byte.
    return int(digits[0]) if digits else 8


def device_groups(attributes: str, num_partitions: int) -> Groups:
    """Groups of devices over which a collective communicates.

    Example:
        >>> device_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        ((0, 2), (1, 3))
        >>> device_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
        ((0, 1), (2, 3))
    """
    if match := _LISTED.search(attributes):
        groups = re.findall(r"\{([\d,]+)\}", match[1])
        all_devices = tuple(range(num_partitions))
        # {} stands for one group of all devices.
        return tuple(tuple(_numbers(group)) for group in groups) or (all_devices,)
    if match := re.search(f"replica_groups={_IOTA}", attributes):
        shape, dims, order = match.groups()
        ids = _permuted(dims, order).reshape(_numbers(shape))
        return tuple(map(tuple, ids.tolist()))
    if match := _MESH.search(attributes):
        return _mesh_groups(match["sizes"], match["ids"] or "", match["axes"])
    return (tuple(range(num_partitions)),)


def _mesh_groups(sizes: str, ids: str, axes: str) -> Groups:
    """Groups along named axes, where `'a':(2)4` is a sub-axis of axis `a`.

    The sub-axis has size 4, and 2 is the product of the sub-axes to the left.
    """
    names = re.findall(r"'([^']*)'=(\d+)", sizes)
    shape = [int(size) for _, size in names]
    stride = {
        name: math.prod(shape[i + 1 :]) * size
        for i, ((name, _), size) in enumerate(zip(names, shape, strict=True))
    }
    size_of = {name: int(size) for name, size in names}
    positions = np.arange(math.prod(shape))
    group_of = positions.copy()
    for name, outer, inner in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes):
        size = int(inner or size_of[name])
        step = stride[name] // (int(outer or 1) * size)
        # Members of a group differ only along `axes`: 0 there names the group.
        group_of -= positions // step % size * step
    devices = _device_order(ids, len(positions))
    return tuple(
        tuple(devices[group_of == group].tolist()) for group in np.unique(group_of)
    )


def _device_order(ids: str, num_devices: int) -> np.ndarray:
    """Device at each position of a mesh."""
    if not ids:
        return np.arange(num_devices)
    if ids.startswith("["):
        dims, _, order = ids.strip("[)").partition("]T(")
        return _permuted(dims.rstrip("]"), order)
    return np.array(_numbers(ids.strip("{}")))


def _permuted(dims: str, order: str | None) -> np.ndarray:
    """Positions of a grid after a transposition."""
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return grid.transpose(_numbers(order) if order else None).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
