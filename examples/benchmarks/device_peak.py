"""A run whose blocks rest on the host: its speed, and its device memory.

The run takes 20 steps or more, on one device and in bfloat16.

python examples/benchmarks/device_peak.py configs/gpt_6p7b.py zero.stage=2
    zero.offload=pinned_host zero.offload.parameter_memory=pinned_host
    zero.offload.gradient_memory=pinned_host model.remat=full
"""

import dataclasses
import sys

from model_flops import model_tflops

import zjax
from zjax.processes.programs import result_line
from zjax.run.bench import describe_measurement, measure

NUM_ROUNDS = 17
"""Of one step, after three steps to warm up."""


def input_bytes(config: zjax.Config) -> int:
    """Of what enters every block."""
    tokens = config.microbatch_size * config.data.length
    return 2 * tokens * config.model.embed_size * config.model.num_layers


def main() -> None:
    config = zjax.load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config, num_rounds=NUM_ROUNDS)
    print(describe_measurement(measurement))
    inputs = input_bytes(config)
    print(f"inputs of blocks: {inputs / 1e9:.2f} GB")
    found = {"bytes_beyond_inputs": measurement.peak_bytes - inputs}
    tflops = model_tflops(config, measurement)
    print(result_line(dataclasses.asdict(measurement) | tflops | found))


if __name__ == "__main__":
    main()
