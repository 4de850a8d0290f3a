"""`zjax bench`, and how its speed compares with one large product of matrices.

python examples/benchmarks/matmul_share.py configs/llama_8b.py zero.stage=3
"""

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp

from zjax.bench import Spread, describe_measurement, measure, result_line
from zjax.config import load_config
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


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    rate = matmul_flops()
    measurement = measure(config)
    speed = measurement.tokens_per_second_per_device.median
    model, length = config.model, config.data.length
    half = flops_per_token(model, length, causal_attention="half")
    full = flops_per_token(model, length, causal_attention="full")
    shares = {
        "matmul_flops": dataclasses.asdict(rate),
        "matmul_share": speed * half / rate.median,
        "matmul_share_full_attention": speed * full / rate.median,
    }
    print(describe_measurement(measurement))
    print(f"8192^3 product: {rate.median / 1e12:.0f} TFLOP/s")
    print(result_line(dataclasses.asdict(measurement) | shares))


if __name__ == "__main__":
    main()
