"""Three steps of a model that fills the memories of a machine, disks among them.

python examples/benchmarks/three_steps.py configs/gpt_6p7b.py
    zero.offload=auto "zero.offload.nvme_paths=('/nvme',)"
"""

import dataclasses
import pathlib
import sys
import time

from zjax.config import load_config
from zjax.processes.programs import result_line
from zjax.run.bench import describe_measurement, measure


def main() -> None:
    config = load_config(sys.argv[1], *sys.argv[2:])
    for path in config.zero.placement.nvme_paths:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    measurement = measure(config, num_warm_up=2, num_rounds=1)
    found = dataclasses.asdict(measurement)
    found["used_bytes"] = (measurement.peak_bytes or 0) + measurement.moved_state_bytes
    print(describe_measurement(measurement))
    print(f"device, host and disks: {found['used_bytes'] / 1e9:.0f} GB")
    print(f"with placing its state: {time.perf_counter() - start:.0f} s")
    print(result_line(found))


if __name__ == "__main__":
    main()
