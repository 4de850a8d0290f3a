"""Kernels of layer norm and RMS norm over the last dim on a Hopper GPU.

Each program is one warpgroup that holds a row in registers and prefetches the next row.
The backward pass accumulates the gradients of scale and bias in registers over all rows
of a program, so that `x` and `d_out` are read once for all three gradients.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.device import NUM_SMS
from zjax_kernels.norm.reference import MAX_CHANNELS, THREADS
from zjax_kernels.warpgroups import launch, load

_MAX_PROGRAMS_PER_SM = 8
"""Programs per SM; long rows take more registers, and get fewer programs."""


def forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    *,
    eps: float,
    centre: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs `reference.forward` for 16-bit arrays [..., C], C a multiple of 128.

    `interpret` holds the interpreter's parameters; None on a GPU.
    """
    rows, channels = _rows(x)
    # The registers of an SM hold three programs with the longest rows.
    programs = _num_programs(rows, 3 * MAX_CHANNELS // channels)
    weights = [w.astype(jnp.float32) for w in (scale, bias) if w is not None]

    def body(inputs, outputs, _):
        (x_ref, *weight_refs), (out_ref, mean_ref, inverse_ref) = inputs, outputs
        read = _loader(channels, interpret)

        def normalize(row, narrow):
            wide = narrow[0].astype(jnp.float32)
            mean = jnp.sum(wide) / channels if centre else jnp.float32(0)
            # The row is in registers: a second pass is free and does not cancel.
            centred = wide - mean
            inverse = lax.rsqrt(jnp.sum(centred * centred) / channels + eps)
            result = centred * inverse * read(weight_refs[0])
            if bias is not None:
                result += read(weight_refs[1])
            out_ref[row] = result.astype(x.dtype)
            mean_ref[row], inverse_ref[row] = mean, inverse

        _each_row(rows, programs, lambda row: (read(x_ref.at[row]),), normalize)

    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = jax.ShapeDtypeStruct((rows, channels), x.dtype), statistic, statistic
    flat = x.reshape(rows, channels)
    out, *statistics = launch(
        body,
        (flat, *weights),
        outputs,
        num_programs=programs,
        approx_math=True,
        interpret=interpret,
    )
    mean, inverse = (each.reshape(*x.shape[:-1], 1) for each in statistics)
    return out.reshape(x.shape), mean, inverse


def backward(
    x: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
    *,
    centre: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Runs `reference.backward` for 16-bit arrays [..., C], C a multiple of 128."""
    rows, channels = _rows(x)
    # Two rows and the sums at a time: one program fewer than in the forward pass.
    programs = _num_programs(rows, 2 * MAX_CHANNELS // channels)
    num_sums = 2 if centre else 1

    def body(inputs, outputs, _):
        x_ref, d_ref, mean_ref, inverse_ref, scale_ref = inputs
        dx_ref, *sum_refs = outputs
        read = _loader(channels, interpret)

        def fetch(row):
            arrays = read(x_ref.at[row]), read(d_ref.at[row])
            return *arrays, mean_ref[row], inverse_ref[row]

        def differentiate(row, fetched, sums):
            narrow, d_narrow, mean, inverse = fetched
            normal = (narrow.astype(jnp.float32) - mean) * inverse
            wide = d_narrow.astype(jnp.float32)
            scaled = wide * read(scale_ref)
            dx = scaled - normal * (jnp.sum(scaled * normal) / channels)
            if centre:
                dx -= jnp.sum(scaled) / channels
            dx_ref[row] = (dx * inverse).astype(x.dtype)
            parts = (wide * normal, wide)[:num_sums]
            return [a + b for a, b in zip(sums, parts, strict=True)]

        zero = jnp.zeros(channels, jnp.float32)
        if interpret is None:
            # The sums that the loop carries need the layout of the rows.
            zero = plgpu.layout_cast(zero, _layout(channels))
        sums = _each_row(rows, programs, fetch, differentiate, [zero] * num_sums)
        for ref, each in zip(sum_refs, sums, strict=True):
            # One partial sum per program, added by XLA: atomics would add in any order.
            ref[lax.axis_index("program")] = each

    partial = jax.ShapeDtypeStruct((programs, channels), jnp.float32)
    dx = jax.ShapeDtypeStruct((rows, channels), x.dtype)
    outputs = dx, *[partial] * num_sums
    flat = (each.reshape(rows, channels) for each in (x, d_out))
    statistics = (each.reshape(rows) for each in (mean, inverse))
    dx, *sums = launch(
        body,
        (*flat, *statistics, scale.astype(jnp.float32)),
        outputs,
        num_programs=programs,
        approx_math=True,
        interpret=interpret,
    )
    d_scale, *d_bias = (each.sum(0) for each in sums)
    return dx.reshape(x.shape), d_scale, d_bias[0] if centre else None


def _num_programs(rows, programs_per_sm):
    return min(rows, NUM_SMS * min(programs_per_sm, _MAX_PROGRAMS_PER_SM))


def _rows(x):
    return x.size // x.shape[-1], x.shape[-1]


def _each_row(rows, programs, fetch, act, sums=None):
    """Runs `act` on each row of a program; rows are fetched one ahead."""
    program = lax.axis_index("program")

    def step(i, carried):
        fetched, sums = carried
        row = program + i * programs
        # The last prefetch, which nobody uses, must not read beyond the array.
        prefetched = fetch(jnp.minimum(row + programs, rows - 1))
        return prefetched, act(row, fetched, *([sums] if sums else ()))

    num_rows = lax.div(rows - 1 - program, programs) + 1
    return lax.fori_loop(0, num_rows, step, (fetch(program), sums))[1]


def _layout(channels):
    """Returns the layout of a row in registers: strided over the warpgroup."""
    each = channels // THREADS
    # 8 numbers of 16 bits fill the widest load, 16 bytes.
    vector = next(size for size in (8, 4, 2, 1) if each % size == 0)
    return plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)


def _loader(channels, interpret):
    return functools.partial(load, layout=_layout(channels), interpret=interpret)
