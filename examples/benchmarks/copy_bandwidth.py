"""Bytes per second at which a device reads and writes its own memory.

python examples/benchmarks/copy_bandwidth.py
"""

import functools

import call_timing
import jax
import jax.numpy as jnp

ARRAY_BYTES = 2**30


def main() -> None:
    numbers = jax.random.normal(jax.random.key(0), (ARRAY_BYTES // 4,), jnp.float32)
    copy = functools.partial(jax.jit(jnp.negative), numbers)
    seconds = call_timing.time_calls(copy, jax.block_until_ready, min_calls=10)
    call_timing.print_result(
        {"copy_bytes_per_second": call_timing.rates(2 * numbers.nbytes, seconds)},
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
