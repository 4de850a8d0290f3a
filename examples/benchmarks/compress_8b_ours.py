"""GPTQ with 4 bits of a Llama of 8B of random weights, block by block.

python examples/benchmarks/compress_8b_ours.py [--quick]

Weights are drawn on the device when a block is read, so that no file of 16 GB is
needed; compressed blocks are written to a temporary folder.
"""

import argparse
import tempfile
import time
import zlib

import call_timing
import jax
import jax.numpy as jnp
import numpy as np

import zjax
from zjax.compress.compress import read_rows
from zjax.compress.opened import open_source_of
from zjax.compress.partial import PartialOutput
from zjax.compress.walk import Walk
from zjax.weights.source import Source

SETTINGS = {
    "data": {"source": "synthetic", "length": 2048},
    "model": {"max_length": 2048},
    "compress": {"method": "gptq", "num_rows": 128, "num_heldout_rows": 4},
}
QUICK = {
    "data": {"source": "synthetic", "length": 32},
    "model": {
        "num_layers": 2,
        "embed_size": 32,
        "mlp_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 97,
        "max_length": 32,
    },
    "compress": {"method": "gptq", "num_rows": 4, "num_heldout_rows": 2},
}
STD = 0.02


def draw(name, entry):
    """Draws the weights of a name: matrices normally, scales of norms as 1."""
    if len(entry.shape) < 2:
        return jnp.ones(entry.shape, jnp.bfloat16)
    key = jax.random.key(zlib.crc32(name.encode()))
    return STD * jax.random.normal(key, entry.shape, jnp.bfloat16)


def random_source(expected):
    """Weights of the expected names, drawn when they are read."""

    def read(name, index):
        return np.asarray(draw(name, expected[name]))[index]

    return Source(expected, read)


def measure(config):
    """Seconds and peak bytes of the compression of all blocks."""
    opened = open_source_of(config, random_source, "random weights")
    settings = opened.config.compress
    assert settings is not None
    rows = read_rows(opened.config, settings)
    with tempfile.TemporaryDirectory() as folder:
        output = PartialOutput(f"{folder}/out", {})
        start = time.perf_counter()
        outcome = Walk(opened, settings, *rows).run(output)
        seconds = time.perf_counter() - start
    stats = jax.devices()[0].memory_stats() or {}
    print({name: score.loss for name, score in outcome.scores.items()}, flush=True)
    peak = stats.get("peak_bytes_in_use", 0)
    return {"minutes": seconds / 60, "peak_gb": peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a shape for a CPU")
    given = parser.parse_args()
    config = zjax.load_config("llama_8b", QUICK if given.quick else SETTINGS)
    device = jax.devices()[0].device_kind
    call_timing.print_result(measure(config), device=device, packages=("jax",))


if __name__ == "__main__":
    main()
