"""FLOP/s that one device reaches in products of large bfloat16 matrices.

python examples/benchmarks/matrix_product.py
"""

import json
import time

import jax
import jax.numpy as jnp
import timing

SIZE = 8192
PRODUCTS, WARM_UP_ROUNDS, ROUNDS = 20, 1, 5


def product_tflops() -> list[float]:
    """Of each timed round, in units of 1e12."""
    a, b = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    rates = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([multiply(a, b) for _ in range(PRODUCTS)])
        rates.append(PRODUCTS * 2 * SIZE**3 / (time.perf_counter() - start) / 1e12)
    return rates[WARM_UP_ROUNDS:]


def main() -> None:
    result = {"num_devices": 1, "product_tflops": timing.spread(product_tflops())}
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
