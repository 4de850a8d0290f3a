"""Which share of a GPU's memory bandwidth XLA reaches where nothing is multiplied.

python examples/benchmarks/bandwidth.py

Beside it, on a Hopper GPU, what our kernels reach. Bytes are those that any program
must read and write once; the bandwidth is that of a copy of 1 GiB on the same device.
The scale of packed signs is known only once all numbers are read, so that they are read
again: their best is about two thirds.
"""

import functools

import call_timing
import jax
import jax.numpy as jnp
import timing
from rich.console import Console
from rich.table import Table

from zjax_kernels import dequantise_blocks, layer_norm, quantise_blocks, rms_norm
from zjax_kernels.device import first_device

ROWS, CHANNELS = 16_384, 4_096
IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def mean_of_several(integers, scales):
    return dequantise_blocks(integers, scales).mean(axis=0)


def pack_signs(x, error):
    """One bit a number, the scale, and what is lost: a step of 1-bit compression."""
    x = x + error
    scale = jnp.abs(x).mean()
    positive = x >= 0
    weights = 2 ** jnp.arange(8, dtype=jnp.uint8)
    bits = (positive.reshape(-1, 8) * weights).sum(axis=1, dtype=jnp.uint8)
    return bits, scale, x - jnp.where(positive, scale, -scale)


def gradients(norm, num_weights):
    def run(x, weights, d_out, implementation):
        call = functools.partial(norm, implementation=implementation)
        return jax.vjp(call, x, *weights[:num_weights])[1](d_out)

    return run


def make_cases():
    """What is done, to what, the bytes, and whether there is a kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_out = jax.random.normal(keys[0], (2, ROWS, CHANNELS), jnp.bfloat16)
    weights = tuple(jax.random.normal(keys[1], (2, CHANNELS), jnp.float32))
    numbers = jax.random.normal(keys[2], (2**27,), jnp.float32)
    integers, scales = quantise_blocks(numbers, implementation="reference")
    several = integers.reshape(8, -1, integers.shape[1]), scales.reshape(8, -1)
    row, given = x.nbytes, (x, weights, d_out)
    yield "copy", jnp.negative, (numbers,), 2 * numbers.nbytes, False
    yield "rms_norm", rms_norm, (x, weights[0]), 2 * row, True
    yield "rms_norm, backward", gradients(rms_norm, 1), given, 3 * row, True
    yield "layer_norm", layer_norm, (x, *weights), 2 * row, True
    yield "layer_norm, backward", gradients(layer_norm, 2), given, 3 * row, True
    yield "quantise", quantise_blocks, (numbers,), numbers.nbytes * 5 // 4, True
    size = several[0].nbytes
    yield "dequantise, mean of 8", mean_of_several, several, size + size // 2, False
    yield "pack signs", pack_signs, (numbers, numbers), numbers.nbytes * 3, False


def main() -> None:
    table = Table("what", "XLA, TB/s", "of the copy", "kernel, TB/s", "of the copy")
    copy, is_hopper = 0.0, first_device()[1][0] == 9
    for name, function, args, num_bytes, has_kernel in make_cases():
        cells = []
        for implementation in IMPLEMENTATIONS[: 1 + (has_kernel and is_hopper)]:
            named = {"implementation": implementation} if has_kernel else {}
            compiled = jax.jit(functools.partial(function, **named))
            run = functools.partial(compiled, *args)
            seconds = call_timing.time_calls(run, jax.block_until_ready)
            rate = num_bytes / timing.spread(seconds)["median"] / 1e12
            copy = copy or rate
            cells += [f"{rate:.2f}", f"{rate / copy:.0%}"]
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
