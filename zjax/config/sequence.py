"""How attention crosses the devices of the sequence axis, and whether it can."""

from collections.abc import Iterator

from zjax.config import axes, schema
from zjax.errors import Problem

_WHOLE = ("cudnn", "sparse")
"""Kernels that need whole sequences, which ring attention never has."""


def takes_ring(model: schema.Model, *, sequence: int, tensor: int) -> bool:
    """Whether keys go round, or else heads are split for attention.

    Args:
        model: Read for `sequence_attention` and its heads.
        sequence: Devices along the sequence.
        tensor: Devices along the heads.

    Returns:
        True for ring attention, False for Ulysses.

    Example:
        >>> model = schema.Model(num_heads=12)
        >>> [takes_ring(model, sequence=size, tensor=1) for size in (4, 8)]
        [False, True]
    """
    if model.sequence_attention != "auto":
        return model.sequence_attention == "ring"
    return model.num_heads % (sequence * tensor) != 0


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
    if asked == "ring" and kernel in _WHOLE:
        problem = f"never has the whole sequences of model.attention={kernel!r}"
        yield Problem(field, asked, problem, "use 'ulysses', or model.attention='auto'")
    elif heads % shares and asked == "ulysses":
        yield Problem(field, asked, f"cannot {split}", f"use 'ring', or {more}")
    elif heads % shares and kernel in _WHOLE:
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
    if model.kind == "decoder" and takes_ring(model, sequence=sequence, tensor=tensor):
        unit = 2 * sequence
        why = f"of {unit}, twice mesh.sequence={sequence}, as causal ring attention "
        why += "needs"
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
        yield from way_problems(model, **shares)
        yield from length_problems("data.length", config.data.length, model, **shares)
    elif model.sequence_attention != "auto":
        problem = f"has no effect with mesh.sequence={config.mesh.sequence}"
        remedy = "leave it at 'auto', or set mesh.sequence above 1"
        field, asked = "model.sequence_attention", model.sequence_attention
        yield Problem(field, asked, problem, remedy)
