"""Rates that others published, scaled by the bandwidth of memory to this device.

python examples/benchmarks/published_rates.py

Decoding is bound by memory, so that a rate of another device is multiplied by the ratio
of the bandwidths of a copy.
"""

import argparse

import call_timing
import copy_bandwidth
import jax

H100_COPY = 3.00e12
"""Bytes per second of a copy on an H100 (BENCHMARKS.md, `grouped_matmul_small`)."""
PUBLISHED = {"2048 new tokens/s": 6_612}
"""vLLM 0.13, Llama 3.1 8B in bfloat16 on an H100, 128 requests of 32 tokens: torchao's
documentation."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num_floats", type=int, default=copy_bandwidth.NUM_FLOATS)
    given = parser.parse_args()
    copy = copy_bandwidth.measure(given.num_floats)["copy_bytes_per_second"]
    metrics = {"copy_bytes_per_second": copy}
    for name, rate in PUBLISHED.items():
        scales = {key: rate * copy[key] / H100_COPY for key in ("median", "min", "max")}
        metrics[name] = scales | {"n": copy["n"]}
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
