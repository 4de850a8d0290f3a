"""Which share of a GPU's memory bandwidth XLA reaches where nothing is multiplied.

python examples/benchmarks/bandwidth.py

A kernel of our own can win what is missing to 1. Bytes are those that any program must
read and write once; the bandwidth is that of a copy of 1 GiB on the same device.
"""

import functools

import jax
import jax.numpy as jnp
import sparse_cases as cases
from rich.console import Console
from rich.table import Table

from zjax.ops import layer_norm, rms_norm

ROWS, CHANNELS = 16_384, 4_096
BLOCK = 256


def quantise(x):
    """Blocks of 8-bit integers and their scales, and back: what compression sends."""
    blocks = x.reshape(-1, BLOCK)
    scale = jnp.maximum(jnp.abs(blocks).max(axis=1, keepdims=True) / 127, 1e-12)
    return jnp.round(blocks / scale).astype(jnp.int8), scale


def dequantise_and_add(integers, scales):
    """The mean of what several devices sent."""
    return (integers.astype(jnp.float32) * scales).mean(axis=0)


def pack_signs(x, error):
    """One bit a number, the scale, and what is lost: a step of 1-bit compression."""
    x = x + error
    scale = jnp.abs(x).mean()
    positive = x >= 0
    weights = 2 ** jnp.arange(8, dtype=jnp.uint8)
    bits = (positive.reshape(-1, 8) * weights).sum(axis=1, dtype=jnp.uint8)
    return bits, scale, x - jnp.where(positive, scale, -scale)


def gradients(norm, num_weights):
    def run(x, weights, d_out):
        return jax.vjp(lambda x, *w: norm(x, *w), x, *weights[:num_weights])[1](d_out)

    return run


def make_cases():
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_out = jax.random.normal(keys[0], (2, ROWS, CHANNELS), jnp.bfloat16)
    weights = tuple(jax.random.normal(keys[1], (2, CHANNELS), jnp.float32))
    numbers = jax.random.normal(keys[2], (2**27,), jnp.float32)
    integers, scales = jax.jit(quantise)(numbers)
    several = integers.reshape(8, -1, BLOCK), scales.reshape(8, -1, 1)
    row = x.nbytes
    yield "copy", jnp.negative, (numbers,), 2 * numbers.nbytes
    yield "rms_norm", rms_norm, (x, weights[0]), 2 * row
    yield "rms_norm, backward", gradients(rms_norm, 1), (x, weights, d_out), 3 * row
    yield "layer_norm", layer_norm, (x, *weights), 2 * row
    yield "layer_norm, backward", gradients(layer_norm, 2), (x, weights, d_out), 3 * row
    yield "quantise", quantise, (numbers,), numbers.nbytes * 5 // 4
    size = several[0].nbytes
    yield "dequantise, mean of 8", dequantise_and_add, several, size + size // 2
    yield "pack signs", pack_signs, (numbers, numbers), numbers.nbytes * 3


def main() -> None:
    table = Table("what", "TB/s", "of the copy")
    copy = 0.0
    for name, function, args, num_bytes in make_cases():
        run = functools.partial(jax.jit(function), *args)
        seconds = cases.time_calls(run, jax.block_until_ready)
        rate = num_bytes / cases.spread(seconds)["median"] / 1e12
        copy = copy or rate
        table.add_row(name, f"{rate:.2f}", f"{rate / copy:.0%}")
    console = Console()
    console.print(table)
    console.print(jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
