"""How fast the state of an optimizer passes through the devices, and how fast it could.

A batch so small that computing takes no time leaves the streaming: what a step moves
both ways, over its seconds. Beside it large arrays go up and down at once.

python examples/benchmarks/streamed_bytes.py configs/gpt_6p7b.py model.num_layers=12
    zero.optimizer_memory=pinned_host
"""

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.bench import Spread, describe_measurement, measure, result_line
from zjax.config import load_config

ARRAY_BYTES, NUM_ARRAYS = 2**30, 8
WARM_UP_ROUNDS, ROUNDS = 3, 5


def link_rate() -> Spread:
    """Bytes per second of each device, both ways together and all devices at once."""
    mesh = Mesh(jax.local_devices(), ("device",))
    here = NamedSharding(mesh, PartitionSpec("device"))
    there = here.with_memory_kind("pinned_host")
    ones = jax.device_put(jnp.ones((mesh.size, ARRAY_BYTES // 4), jnp.float32), here)
    held = [jax.device_put(ones, there) for _ in range(NUM_ARRAYS)]
    rates = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        jax.block_until_ready(held)
        start = time.perf_counter()
        pairs = [(jax.device_put(x, here), jax.device_put(ones, there)) for x in held]
        up, held = map(list, zip(*pairs, strict=True))
        jax.block_until_ready((up, held))
        moved = 2 * NUM_ARRAYS * ARRAY_BYTES
        rates.append(moved / (time.perf_counter() - start))
    return Spread.of(rates[WARM_UP_ROUNDS:])


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config)
    moved = 2 * measurement.moved_state_bytes
    seconds = measurement.step_seconds
    streamed = Spread(
        moved / seconds.median, moved / seconds.max, moved / seconds.min, seconds.n
    )
    link = link_rate()
    print(describe_measurement(measurement))
    print(f"streamed {streamed.median / 1e9:.1f}, link {link.median / 1e9:.1f} GB/s")
    rates = {"streamed": streamed, "link": link}
    found = {
        f"{name}_bytes_per_second": dataclasses.asdict(rate)
        for name, rate in rates.items()
    }
    print(result_line(dataclasses.asdict(measurement) | found))


if __name__ == "__main__":
    main()
