"""How fast the state of an optimizer passes through the devices.

A batch so small that computing takes no time leaves the streaming: what a step moves
both ways, over its seconds.

python examples/benchmarks/streamed_bytes.py configs/gpt_6p7b.py model.num_layers=12
    zero.offload=pinned_host
"""

import dataclasses
import sys

from zjax.config import load_config
from zjax.processes.programs import result_line
from zjax.run.bench import Spread, describe_measurement, measure


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config)
    moved = 2 * measurement.moved_state_bytes
    seconds = measurement.step_seconds
    streamed = Spread(
        moved / seconds.median, moved / seconds.max, moved / seconds.min, seconds.n
    )
    print(describe_measurement(measurement))
    print(f"streamed {streamed.median / 1e9:.1f} GB/s")
    rate = {"streamed_bytes_per_second": dataclasses.asdict(streamed)}
    print(result_line(dataclasses.asdict(measurement) | rate))


if __name__ == "__main__":
    main()
