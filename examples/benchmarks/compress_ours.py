"""Packing of float32 numbers by codecs, and unpacking, timed codec by codec.

python examples/benchmarks/compress_ours.py --num_floats=1048576 --codecs=onebit,int8
"""

import argparse

import call_timing
import jax
import jax.numpy as jnp
import timing

from zjax.ops.codecs import make_codec


def time_codec(codec, numbers):
    """Seconds to pack and unpack, as two programs: between them is the link."""
    pack = jax.jit(codec.encode).lower(numbers).compile()
    unpack = jax.jit(codec.decode).lower(pack(numbers)).compile()
    return call_timing.time_calls(lambda: unpack(pack(numbers)), jax.block_until_ready)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_floats", type=int, required=True)
    parser.add_argument("--codecs", required=True)
    given = parser.parse_args()
    numbers = jax.random.normal(jax.random.key(0), (given.num_floats,), jnp.float32)
    metrics = {}
    for name in given.codecs.split(","):
        seconds = time_codec(make_codec(name), numbers)
        call_timing.note(name, seconds)
        metrics[f"{name} seconds"] = timing.spread(seconds)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
