"""How large a model, or how long a sequence, trains in a memory of given size.

The compiler's memory analysis of two small sizes says by a straight line which size
should fit. That one is trained for some steps, and one unit more is shown to fail.

python examples/benchmarks/largest_model.py --pool_gigabytes=32 configs/gpt2_1p5b.py
    zero.stage=3 model.remat=full global_batch_size=0 microbatch_size=1

`--grow=data.length,model.max_length --unit=8192` grows the sequence in place of the
layers; without `--pool_gigabytes` programs may take 92 % of a device. `--brief` trains
two steps.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys

import jax

import zjax
from zjax.processes.programs import result_line
from zjax.run.batch import abstract_batch
from zjax.run.bench import measure

PROBES = (4, 8)
"""Units."""
WHOLE_POOL = 0.92
MOST_TRIALS = 8
NO_ROOM = re.compile("RESOURCE_EXHAUSTED|out of memory|of model state on devices")


def sized(given: argparse.Namespace, size: int) -> list[str]:
    return [*given.settings, *(f"{name}={size}" for name in given.grow.split(","))]


def estimate(given: argparse.Namespace) -> int:
    """Size that fits by the compiler; runs in a process that then ends."""

    def peak(units: int) -> int:
        settings = sized(given, units * given.unit)
        return peak_bytes(zjax.load_config(given.config, *settings))

    few, many = PROBES
    low, high = peak(few), peak(many)
    per_unit = (high - low) / (many - few)
    room = jax.local_devices()[0].memory_stats()["bytes_limit"]
    return int(few + (room - low) // per_unit) * given.unit


def peak_bytes(config: zjax.Config) -> int:
    """What a step takes of a device, by the compiler."""
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = zjax.make_plan(config, zjax.make_mesh(config.mesh), model, tx)
    step = zjax.make_step(model, tx, plan, config)
    return step.predict_peak(abstract_batch(config, plan)).total


def call(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def train(
    given: argparse.Namespace, size: int, environment: dict[str, str]
) -> dict | None:
    """What is measured at a size; None where it does not fit."""
    if given.brief:
        settings = sized(given, size)
        words = [__file__, "--two_steps", given.config]
    else:
        settings = [f"--config.{setting}" for setting in sized(given, size)]
        words = ["-m", "zjax.cli.main", "bench", f"--config={given.config}"]
    code, text = call([sys.executable, *words, *settings], environment)
    if code and not NO_ROOM.search(text):
        raise SystemExit(text)
    print(f"{given.grow}={size}: {'no room' if code else 'trained'}", flush=True)
    if code:
        return None
    return json.loads(re.findall(r"^RESULT (.*)$", text, re.MULTILINE)[-1])


def search(given: argparse.Namespace) -> dict:
    """What the largest size measures that trains where one unit more does not."""
    pool = given.pool_gigabytes
    share = pool_fraction(pool) if pool else WHOLE_POOL
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.6f}"}
    code, text = call([sys.executable, *sys.argv, "--estimate"], environment)
    if code:
        raise SystemExit(text)
    size, name = int(text.split()[-1]), given.grow.split(",")[0].rpartition(".")[2]
    results: dict[int, dict | None] = {}
    for _ in range(MOST_TRIALS):
        result = results[size] = train(given, size, environment)
        size += given.unit if result else -given.unit
        if size in results:
            most = size if results[size] else size - given.unit
            found = {name: most, f"failed_{name}": most + given.unit}
            trained = results[most] or {}
            of_all = {"size_times_devices": most * trained["num_devices"]}
            return trained | found | of_all
    raise SystemExit(f"no end of the search after {MOST_TRIALS} trials: {[*results]}")


def pool_fraction(gigabytes: float) -> float:
    """The share of a device's memory that JAX may take."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    return gigabytes * 1e9 / (int(sizes.split()[0]) * 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--pool_gigabytes", type=float)
    parser.add_argument("--grow", default="model.num_layers")
    parser.add_argument("--unit", type=int, default=1)
    parser.add_argument("--brief", action="store_true")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--estimate", action="store_true")
    modes.add_argument("--two_steps", action="store_true")
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    if given.estimate:
        print(estimate(given))
    elif given.two_steps:
        config = zjax.load_config(given.config, *given.settings)
        found = measure(config, num_warm_up=1, num_rounds=1)
        print(result_line(dataclasses.asdict(found)))
    else:
        print(result_line(search(given)))


if __name__ == "__main__":
    main()
