"""Tuning of the kernel of products of few rows: a rule from the sizes of an H200."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from zjax_kernels.device import NUM_SMS

MAX_ROWS = 64
"""Rows that the kernel takes; with more, a product is not bound by memory."""
MAX_CODE_ROWS = 128
"""Rows that the kernel multiplies by codes, of half or a quarter of the bytes."""
CODE_ROWS = {"int8": 128, "int4": 256}
"""Rows up to which codes are multiplied as they are."""
PIECE_ROWS = {"int8": 128, "int4": 128}
"""Rows of a call of the kernel with codes; calls read the codes one after another."""
NORM_ROWS = 16
"""Rows up to which the kernel with codes applies norms."""
GATE_ROWS = {"int8": 64, "int4": 64}
"""Rows up to which the kernel with codes applies activations with gates."""
CHUNK = 64
"""Channels of 128 bytes, the width of the swizzle."""
STEP_BYTES = 128
"""Bytes of the weights of an output in a step."""
WIDTHS = (128, 64)
"""Output channels of a program, preferred first."""
MAX_SPLITS = 8
"""Programs of a cluster that any Hopper GPU runs."""
_MEMORY = 224 * 1024
"""Bytes of shared memory of an SM that programs may fill."""
_FILLED = 0.9
"""Share of the SMs that have a program, at least, where each has one at most."""
_FEW_ROWS = 16
"""Rows up to which wide tiles leave memory for sums of other programs."""
_CODE_PROGRAMS, _MIN_CODE_STAGES = 2, 2
"""Programs with codes of an SM, and stages of a program, at least."""
_BUSY = 0.85
"""Share of the places for programs with codes that is enough."""
_MIN_STAGES, _IN_FLIGHT = 3, 64 * 1024
"""Stages of a program, and bytes of weights on the way to an SM, at least."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that set how fast the kernel runs.

    Args:
        width: Output channels of a program, a multiple of 64.
        splits: Programs that share the contracted channels of a tile, 1 or more.
        stages: Steps of weights in shared memory at a time, 2 or more.
    """

    width: int
    splits: int
    stages: int


def num_bits(dtype: Any) -> int:
    """Returns the bits of a number of a dtype.

    Example:
        >>> [num_bits(dtype) for dtype in (jnp.bfloat16, jnp.int8, jnp.int4)]
        [16, 8, 4]
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits


def step_depth(dtype: Any) -> int:
    """Returns the contracted channels of a step."""
    return 8 * STEP_BYTES // num_bits(dtype)


def choose(
    rows: int,
    depth: int,
    columns: int,
    *,
    parts: int = 1,
    normal: bool = False,
    dtype: Any = jnp.bfloat16,
    matrices: int = 1,
) -> Tuning:
    """Returns the tuning for `rows` of `depth` inputs and `columns` outputs.

    Each output is of `parts` columns of the weights, which have a `dtype`; `normal`
    says whether the rows are normalised. One kernel multiplies by all `matrices`.
    """
    if num_bits(dtype) < 16:
        shape = rows, depth, columns
        return _choose_for_codes(*shape, parts, normal, dtype)
    # A program scales all rows for a norm: fewer programs repeat less.
    repeats = normal and rows <= _FEW_ROWS
    fill_wide = matrices * (columns // WIDTHS[0]) >= NUM_SMS
    wide = columns % WIDTHS[0] == 0 and (repeats or fill_wide)
    width = WIDTHS[0] if wide and parts == 1 else WIDTHS[1]
    tiles = matrices * (columns // width)
    steps = max(1, depth // step_depth(dtype))
    pairs = max(1, min(2, NUM_SMS // tiles))
    fills = _FILLED * NUM_SMS <= tiles * pairs <= NUM_SMS
    # A program on each SM has the longest ring; clusters of more than two might not fit
    # so.
    order = (1, 2) if fills else (2, 1)
    found = None
    for programs_per_sm in order:
        # Up to a third of the memory holds sums that others send.
        sent = 3 * _sent_bytes(rows, width, parts, normal)
        splits = max(
            1,
            min(
                programs_per_sm * NUM_SMS // tiles,
                steps,
                1 + _MEMORY // programs_per_sm // sent,
                MAX_SPLITS,
            ),
        )
        # More programs would not have fewer steps.
        splits = -(-steps // -(-steps // splits))
        stages = num_stages(
            rows,
            width,
            splits,
            programs_per_sm,
            parts=parts,
            normal=normal,
            dtype=dtype,
        )
        found = Tuning(width, splits, stages)
        in_flight = programs_per_sm * stages * parts * width * STEP_BYTES
        if stages >= _MIN_STAGES and in_flight >= _IN_FLIGHT:
            break
    assert found is not None
    return found


def _choose_for_codes(
    rows: int, depth: int, columns: int, parts: int, normal: bool, dtype: Any
) -> Tuning:
    """Returns the tuning of a product with codes.

    Some programs of an SM widen codes while others wait for theirs: short rings of many
    programs are faster than a long ring of one.
    """
    width = WIDTHS[1]
    tiles, steps = columns // width, depth // step_depth(dtype)
    stages_of = functools.partial(
        num_stages, rows, width, parts=parts, normal=normal, dtype=dtype
    )
    found, best = Tuning(width, 1, stages_of(1, 1)), 0.0
    for splits in range(1, min(MAX_SPLITS, steps) + 1):
        fewest = -(-tiles * splits // NUM_SMS)
        several = max(_CODE_PROGRAMS, fewest)
        busy = tiles * splits / (several * NUM_SMS)
        stages = stages_of(splits, several)
        if stages < _MIN_CODE_STAGES:  # many rows: one program of an SM has room
            stages = stages_of(splits, fewest)
        if stages >= _MIN_CODE_STAGES and busy > best:
            found, best = Tuning(width, splits, stages), busy
        if best >= _BUSY:
            break
    return found


def num_stages(
    rows: int,
    width: int,
    splits: int,
    programs_per_sm: int,
    *,
    parts: int = 1,
    normal: bool = False,
    dtype: Any = jnp.bfloat16,
) -> int:
    """Returns the stages of programs that share the memory of an SM."""
    rows, depth, bits = -(-rows // 8) * 8, step_depth(dtype), num_bits(dtype)
    # A result and a residual, and sums that others send.
    fixed = 4 * rows * width + (splits - 1) * _sent_bytes(rows, width, parts, normal)
    # Rows, scales of a norm, weights, and scales of groups of 64 channels.
    stage = 2 * depth * rows + 4 * depth + parts * width * STEP_BYTES
    if bits < 16:
        stage += 4 * parts * width * depth // CHUNK
    return (_MEMORY // programs_per_sm - fixed) // stage


def _sent_bytes(rows: int, width: int, parts: int, normal: bool) -> int:
    """Returns the bytes of the sums of a program, and of squares for a norm."""
    return 4 * -(-rows // 8) * 8 * (parts * width + normal * CHUNK)
