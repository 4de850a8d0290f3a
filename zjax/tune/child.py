"""A process of `zjax tune` that has the devices: it names them, or takes a few steps.

python -m zjax.tune.child PARENT_PID NUM_SIMULATED_DEVICES [CONFIG]
"""

import dataclasses
import math
import sys

import jax

from zjax.bench.measure import measure
from zjax.budget.mesh import this_machine
from zjax.compiler import simulation
from zjax.config.load import load_config
from zjax.errors import ZjaxError
from zjax.processes.programs import result_line
from zjax.processes.start import die_with_parent

WARM_UP_STEPS = 2
TIMED_ROUNDS = 3


def main() -> None:
    """Prints a result for the process that started this one."""
    parent, simulated, *paths = sys.argv[1:]
    die_with_parent(int(parent))  # a trial must not hold the devices on its own
    for option, value in simulation(int(simulated)).items():
        jax.config.update(option, value)
    if not paths:
        devices = jax.devices()
        machine = dataclasses.asdict(this_machine(devices))
        size = machine["device_bytes"]
        machine["device_bytes"] = size if math.isfinite(size) else None
        print(result_line({"kind": devices[0].device_kind, **machine}))
        return
    config = load_config(paths[0])
    found = measure(config, num_warm_up=WARM_UP_STEPS, num_rounds=TIMED_ROUNDS)
    print(result_line(dataclasses.asdict(found)))


if __name__ == "__main__":
    try:
        main()
    except ZjaxError as error:
        print(f"zjax: {error}")
        sys.exit(2)
