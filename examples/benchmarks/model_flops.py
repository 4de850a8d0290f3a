"""`zjax bench`, and how its speed compares with one large product of matrices.

python examples/benchmarks/matmul_share.py configs/llama_8b.py zero.stage=3
"""

import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from zjax.bench import (
    Measurement,
    Spread,
    describe_measurement,
    measure,
    result_line,
)
from zjax.config import Config, load_config
from zjax.observe import flops_per_token

SIZE = 8192
PRODUCTS, REPEATS = 20, 5


def matmul_flops() -> Spread:
    """FLOP/s of bfloat16 products of SIZE x SIZE matrices on one device."""
    a, b = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    rates = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([multiply(a, b) for _ in range(PRODUCTS)])
        rates.append(PRODUCTS * 2 * SIZE**3 / (time.perf_counter() - start))
    return Spread.of(rates[1:])


def describe_share(config: Config, measurement: Measurement) -> dict[str, Any]:
    """The speed of a run as a share of the product's, to be printed with it."""
    rate = matmul_flops()
    print(f"8192^3 product: {rate.median / 1e12:.0f} TFLOP/s")
    speed = measurement.tokens_per_second_per_device.median
    model, length = config.model, config.data.length
    half = flops_per_token(model, length, causal_attention="half")
    full = flops_per_token(model, length, causal_attention="full")
    return {
        "matmul_flops": dataclasses.asdict(rate),
        "matmul_share": speed * half / rate.median,
        "matmul_share_full_attention": speed * full / rate.median,
    }


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config)
    print(describe_measurement(measurement))
    share = describe_share(config, measurement)
    print(result_line(dataclasses.asdict(measurement) | share))


if __name__ == "__main__":
    main()
