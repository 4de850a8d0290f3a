"""How fast large arrays go up to the devices and down to the host at once, or up alone.

python examples/benchmarks/host_link.py
"""

import json
import time

import jax
import jax.numpy as jnp
import timing
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ARRAY_BYTES, NUM_ARRAYS = 2**30, 8
WARM_UP_ROUNDS, ROUNDS = 3, 5


def link_rates() -> list[float]:
    """Bytes per second of each device, both ways together and all devices at once."""
    mesh = Mesh(jax.local_devices(), ("device",))
    on_device = NamedSharding(mesh, PartitionSpec("device"))
    on_host = on_device.with_memory_kind("pinned_host")
    ones = jnp.ones((mesh.size, ARRAY_BYTES // 4), jnp.float32)
    ones = jax.device_put(ones, on_device)
    held = [jax.device_put(ones, on_host) for _ in range(NUM_ARRAYS)]
    rates = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        jax.block_until_ready(held)
        start = time.perf_counter()
        pairs = [
            (jax.device_put(x, on_device), jax.device_put(ones, on_host)) for x in held
        ]
        up, held = map(list, zip(*pairs, strict=True))
        jax.block_until_ready((up, held))
        moved = 2 * NUM_ARRAYS * ARRAY_BYTES
        rates.append(moved / (time.perf_counter() - start))
    return rates[WARM_UP_ROUNDS:]


def upward_rates() -> list[float]:
    """Bytes per second of each device from pinned host memory, all devices at once."""
    mesh = Mesh(jax.local_devices(), ("device",))
    on_device = NamedSharding(mesh, PartitionSpec("device"))
    ones = jax.device_put(jnp.ones((mesh.size, ARRAY_BYTES // 4)), on_device)
    on_host = on_device.with_memory_kind("pinned_host")
    held = [jax.device_put(ones, on_host) for _ in range(NUM_ARRAYS)]
    jax.block_until_ready(held)
    rates = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([jax.device_put(x, on_device) for x in held])
        rates.append(NUM_ARRAYS * ARRAY_BYTES / (time.perf_counter() - start))
    return rates[WARM_UP_ROUNDS:]


def main() -> None:
    result = {
        "num_devices": jax.local_device_count(),
        "link_bytes_per_second": timing.spread(link_rates()),
        "upward_bytes_per_second": timing.spread(upward_rates()),
    }
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
