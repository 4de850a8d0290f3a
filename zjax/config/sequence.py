"""How attention crosses the devices of the sequence axis, and whether it can."""

from collections.abc import Iterator
from typing import Literal

from zjax.config import axes, schema
from zjax.errors import Problem

Way = Literal["ulysses", "ring", "halo"]
TILE = 128
"""Tokens that the kernels of sparse attention compute together, on one device: theirs,
which nothing here may import. Blocks divide it."""


def way_across(model: schema.Model, *, sequence: int, tensor: int) -> Way:
    """What the devices of a sequence send each other for attention.

    Args:
        model: Read for `sequence_attention`, `attention` and its heads.
        sequence: Devices along the sequence.
        tensor: Devices along the heads.

    Returns:
        `ulysses`, which splits heads in place of tokens; `ring`, in which all keys go
        round; or `halo`, in which blocks of keys go where they are seen.

    Example:
        >>> model = schema.Model(num_heads=12)
        >>> [way_across(model, sequence=size, tensor=1) for size in (4, 8)]
        ['ulysses', 'ring']
    """
    if model.sequence_attention != "auto":
        return model.sequence_attention
    if model.num_heads % (sequence * tensor) == 0:
        return "ulysses"
    return "halo" if model.attention == "sparse" else "ring"


def way_problems(
    model: schema.Model, *, sequence: int, tensor: int
) -> Iterator[Problem]:
    """Finds why attention cannot cross the devices of a sequence.

    Args:
        model: Read for its attention and heads.
        sequence: Devices along the sequence, 2 or more.
        tensor: Devices along the heads.

    Yields:
        At most one problem.

    Example:
        >>> model = schema.Model(num_heads=12, sequence_attention="ulysses")
        >>> print(*way_problems(model, sequence=8, tensor=1))
        model.sequence_attention='ulysses' cannot split model.num_heads=12 over \
mesh.tensor * mesh.sequence=8; use 'ring', or a multiple of 8 heads
    """
    shares, heads = sequence * tensor, model.num_heads
    asked, kernel = model.sequence_attention, model.attention
    split = f"split model.num_heads={heads} over mesh.tensor * mesh.sequence={shares}"
    field, more = "model.sequence_attention", f"a multiple of {shares} heads"
    parts = "halo" if kernel == "sparse" else "ring"
    if asked == "ring" and kernel in ("cudnn", "sparse"):
        problem = f"never has the whole sequences of model.attention={kernel!r}"
        other = "'halo' or 'ulysses'" if kernel == "sparse" else "'ulysses'"
        remedy = f"use {other}, or model.attention='auto'"
        yield Problem(field, asked, problem, remedy)
    elif asked == "halo" and kernel != "sparse":
        problem = f"needs a pattern, which model.attention={kernel!r} has not"
        remedy = "use 'auto', or model.attention='sparse'"
        yield Problem(field, asked, problem, remedy)
    elif heads % shares and asked == "ulysses":
        yield Problem(field, asked, f"cannot {split}", f"use {parts!r}, or {more}")
    elif heads % shares and kernel == "cudnn":
        problem = f"needs whole sequences and cannot {split}"
        yield Problem("model.attention", kernel, problem, f"use 'auto', or {more}")


def length_problems(
    field: str, length: int, model: schema.Model, *, sequence: int, tensor: int
) -> Iterator[Problem]:
    """Finds a length that does not divide over the devices of a sequence.

    Args:
        field: What to call the length.
        length: Tokens per sequence.
        model: Read for its kind and its attention.
        sequence: Devices along the sequence.
        tensor: Devices along the heads.

    Yields:
        At most one problem.

    Example:
        >>> model = schema.Model(sequence_attention="ring")
        >>> print(*length_problems("data.length", 12, model, sequence=4, tensor=1))
        data.length=12 is not a multiple of 8, twice mesh.sequence=4, as causal ring \
attention needs; use 8 or 16
    """
    unit, why = sequence, f"of mesh.sequence={sequence}"
    way = way_across(model, sequence=sequence, tensor=tensor)
    if way == "ring" and model.kind == "decoder":
        unit = 2 * sequence
        why = f"of {unit}, twice mesh.sequence={sequence}, as causal ring attention "
        why += "needs"
    elif way == "halo":
        unit = TILE * sequence
        why = f"of {unit}, {TILE} tokens for each of mesh.sequence={sequence}, as "
        why += "sparse attention by halos needs"
    below = length // unit * unit
    if below != length:
        around = f"{below} or {below + unit}" if below else f"{unit}"
        yield Problem(field, length, f"is not a multiple {why}", f"use {around}")


def sequence_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Finds what the sequence axis cannot split.

    Args:
        config: Settings in range.
        num_devices: Devices of the run.

    Yields:
        One problem per setting.

    Example:
        >>> model = schema.Model(sequence_attention="ring")
        >>> print(*sequence_problems(schema.Config(model=model), 1))
        model.sequence_attention='ring' has no effect with mesh.sequence=1; leave it \
at 'auto', or set mesh.sequence above 1
    """
    sizes = axes.axis_sizes(config, num_devices)
    if not axes.mesh_fills(config, num_devices):
        return
    model, shares = config.model, {axis: sizes[axis] for axis in ("sequence", "tensor")}
    if shares["sequence"] > 1:
        found = [*way_problems(model, **shares)]
        length = config.data.length
        yield from found or length_problems("data.length", length, model, **shares)
    elif model.sequence_attention != "auto":
        problem = f"has no effect with mesh.sequence={config.mesh.sequence}"
        remedy = "leave it at 'auto', or set mesh.sequence above 1"
        field, asked = "model.sequence_attention", model.sequence_attention
        yield Problem(field, asked, problem, remedy)
