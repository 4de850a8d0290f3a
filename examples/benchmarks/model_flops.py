"""`zjax bench`, and the FLOP/s of the model with its attention.

python examples/benchmarks/model_flops.py configs/llama_8b.py zero.stage=3
"""

import dataclasses
import sys

from zjax.config import Config, load_config
from zjax.models.flops import flops_per_token
from zjax.processes.programs import result_line
from zjax.run.bench import Measurement, describe_measurement, measure


def model_tflops(config: Config, measurement: Measurement) -> dict[str, float]:
    """Per device, in units of 1e12; causal attention counted half, and in full."""
    speed = measurement.tokens_per_second_per_device.median
    model, length = config.model, config.data.length
    half = flops_per_token(model, length, causal_attention="half")
    full = flops_per_token(model, length, causal_attention="full")
    return {
        "tflops_causal_attention": speed * half / 1e12,
        "tflops_full_attention": speed * full / 1e12,
    }


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config)
    print(describe_measurement(measurement))
    tflops = model_tflops(config, measurement)
    print(result_line(dataclasses.asdict(measurement) | tflops))


if __name__ == "__main__":
    main()
