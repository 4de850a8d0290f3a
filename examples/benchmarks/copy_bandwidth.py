"""Bytes per second at which a device reads and writes its own memory.

python examples/benchmarks/copy_bandwidth.py [--num_floats=N]
"""

import argparse
import functools

import call_timing
import jax
import jax.numpy as jnp
import timing

NUM_FLOATS = 2**28


def measure(num_floats: int = NUM_FLOATS) -> dict[str, dict]:
    """Metrics of a copy."""
    numbers = jax.random.normal(jax.random.key(0), (num_floats,), jnp.float32)
    copy = functools.partial(jax.jit(jnp.negative), numbers)
    seconds = call_timing.time_calls(copy, jax.block_until_ready, min_calls=10)
    return {
        "copy_bytes_per_second": call_timing.rates(2 * numbers.nbytes, seconds),
        "copy_seconds": timing.spread(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_floats", type=int, default=NUM_FLOATS)
    metrics = measure(parser.parse_args().num_floats)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
