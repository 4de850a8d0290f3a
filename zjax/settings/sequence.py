"""Chooses the method of attention across the sequence axis, and checks lengths."""

from collections.abc import Iterator
from typing import Literal

from zjax.errors import Problem
from zjax.settings import axes, choices, schema

Method = Literal["ulysses", "ring", "halo"]
TILE = 128
"""Tokens per tile of the sparse attention kernels, a multiple of every block size.

This package may not import the kernels.
"""


def sequence_method(model: schema.Model, *, sequence: int, tensor: int) -> Method:
    """Method by which attention communicates along the sequence axis.

    `ulysses` exchanges tokens for heads, `ring` passes all keys around, `halo` sends
    each device the blocks of keys that local queries attend to. `sequence` and `tensor`
    are sizes of mesh axes.

    Example:
        >>> model = schema.Model(num_heads=12)
        >>> [sequence_method(model, sequence=size, tensor=1) for size in (4, 8)]
        ['ulysses', 'ring']
    """
    if model.sequence_attention != "auto":
        return model.sequence_attention
    if model.num_heads % (sequence * tensor) == 0:
        return "ulysses"
    return "halo" if isinstance(model.attention, schema.Sparse) else "ring"


def method_problems(
    model: schema.Model, *, sequence: int, tensor: int
) -> Iterator[Problem]:
    """Yields at most one reason why attention cannot cross the sequence axis.

    Example:
        >>> model = schema.Model(num_heads=12, sequence_attention="ulysses")
        >>> print(*method_problems(model, sequence=8, tensor=1))
        model.sequence_attention='ulysses' cannot split model.num_heads=12 over \
mesh.tensor * mesh.sequence=8; use 'ring', or a multiple of 8 heads
    """
    num_shards, heads = sequence * tensor, model.num_heads
    method, kernel = model.sequence_attention, model.attention.kind
    split = (
        f"split model.num_heads={heads} over mesh.tensor * mesh.sequence={num_shards}"
    )
    field, multiple = "model.sequence_attention", f"a multiple of {num_shards} heads"
    alternative = "halo" if kernel == "sparse" else "ring"
    chosen = sequence_method(model, sequence=sequence, tensor=tensor)
    lacking = _ring_lacks(model)
    if chosen == "ring" and lacking:
        problem = f"takes the ring, which {lacking}" if method == "auto" else lacking
        remedy = f"use 'ulysses' with {multiple}, or leave that out"
        yield Problem(field, method, problem, remedy)
    elif method == "ring" and kernel in ("cudnn", "sparse"):
        problem = (
            f"never gathers the whole sequences that model.attention={kernel!r} needs"
        )
        other = "'halo' or 'ulysses'" if kernel == "sparse" else "'ulysses'"
        remedy = f"use {other}, or model.attention='auto'"
        yield Problem(field, method, problem, remedy)
    elif method == "halo" and kernel != "sparse":
        problem = f"needs a sparsity pattern, which model.attention={kernel!r} lacks"
        remedy = "use 'auto', or model.attention='sparse'"
        yield Problem(field, method, problem, remedy)
    elif heads % num_shards and method == "ulysses":
        yield Problem(
            field, method, f"cannot {split}", f"use {alternative!r}, or {multiple}"
        )
    elif heads % num_shards and kernel == "cudnn":
        problem = f"needs whole sequences and cannot {split}"
        yield Problem("model.attention", kernel, problem, f"use 'auto', or {multiple}")


def _ring_lacks(model: schema.Model) -> str:
    """Feature of the model that ring attention lacks; empty if there is none."""
    for name in ("window.size", "attention_soft_cap"):
        if bound := choices.value_at(model, name):
            return f"does not bound attention by model.{name}={bound}"
    if model.attention_sinks:
        return "has no scores without keys, as model.attention_sinks=True needs"
    if rate := model.attention_dropout_rate:
        return f"drops no weights by model.attention_dropout_rate={rate}"
    return ""


def window_problem(method: Method) -> Problem:
    """Problem of an attention window with a method other than `ulysses`.

    Example:
        >>> print(window_problem("ring"))
        model.sequence_attention='ring' does not limit attention to \
sequence_warmup='window'; use 'ulysses', or sequence_warmup='truncate'
    """
    problem = "does not limit attention to sequence_warmup='window'"
    remedy = "use 'ulysses', or sequence_warmup='truncate'"
    return Problem("model.sequence_attention", method, problem, remedy)


def length_problems(
    field: str, length: int, model: schema.Model, *, sequence: int, tensor: int
) -> Iterator[Problem]:
    """Yields a problem if a length does not divide over the sequence axis.

    Example:
        >>> model = schema.Model(sequence_attention="ring")
        >>> print(*length_problems("data.length", 12, model, sequence=4, tensor=1))
        data.length=12 is not a multiple of 8, twice mesh.sequence=4, as causal ring \
attention needs; use 8 or 16
    """
    unit, why = sequence, f"of mesh.sequence={sequence}"
    method = sequence_method(model, sequence=sequence, tensor=tensor)
    if method == "ring" and model.kind == "decoder":
        # Zigzag order: a device takes an early and a late chunk, which balances the
        # work under a causal mask.
        unit = 2 * sequence
        why = f"of {unit}, twice mesh.sequence={sequence}, as causal ring attention "
        why += "needs"
    elif method == "halo":
        unit = TILE * sequence
        why = f"of {unit}, {TILE} tokens for each of mesh.sequence={sequence}, as "
        why += "sparse attention by halos needs"
    below = length // unit * unit
    if below != length:
        around = f"{below} or {below + unit}" if below else f"{unit}"
        yield Problem(field, length, f"is not a multiple {why}", f"use {around}")


def sequence_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that contradict the sequence axis.

    Example:
        >>> model = schema.Model(sequence_attention="ring")
        >>> print(*sequence_problems(schema.Config(model=model), 1))
        model.sequence_attention='ring' has no effect with mesh.sequence=1; leave it \
at 'auto', or set mesh.sequence above 1
    """
    sizes = axes.axis_sizes(config, num_devices)
    # The rule of the mesh reports wrong sizes.
    if not axes.mesh_fills(config, num_devices):
        return
    model, num_shards = (
        config.model,
        {axis: sizes[axis] for axis in ("sequence", "tensor")},
    )
    if num_shards["sequence"] > 1:
        found = [*method_problems(model, **num_shards)]
        length = config.data.length
        yield from found or length_problems("data.length", length, model, **num_shards)
    elif model.sequence_attention != "auto":
        problem = f"has no effect with mesh.sequence={config.mesh.sequence}"
        remedy = "leave it at 'auto', or set mesh.sequence above 1"
        field, asked = "model.sequence_attention", model.sequence_attention
        yield Problem(field, asked, problem, remedy)
