"""How many layers of a model train in a memory of given size.

The compiler's memory analysis of two small depths says by a straight line which depth
should fit. That one is trained for some steps, and one layer more is shown to fail.

python examples/benchmarks/largest_model.py --pool_gigabytes=32 configs/gpt2_1p5b.py
    zero.stage=3 model.remat=full global_batch_size=0 microbatch_size=1
"""

import argparse
import json
import os
import re
import subprocess
import sys

import jax

import zjax
from zjax.bench import predicted_peak_bytes, result_line
from zjax.fitting import abstract_batch

PROBES = (4, 8)
MOST_TRIALS = 8
NO_ROOM = re.compile("RESOURCE_EXHAUSTED|out of memory|of model state on devices")


def estimate(config: str, settings: list[str]) -> int:
    """Layers that fit by the compiler; runs in a process that then ends."""

    def peak(num_layers: int) -> int:
        sized = zjax.load_config(config, *settings, f"model.num_layers={num_layers}")
        model = zjax.make_model(sized)
        tx = zjax.make_optimizer(sized, model)
        plan = zjax.make_plan(sized, zjax.make_mesh(sized.mesh), model, tx)
        step = zjax.make_step(model, tx, plan, sized)
        return predicted_peak_bytes(step.compile(abstract_batch(sized, plan)))

    few, many = PROBES
    low, high = peak(few), peak(many)
    per_layer = (high - low) / (many - few)
    room = jax.local_devices()[0].memory_stats()["bytes_limit"]
    return int(few + (room - low) // per_layer)


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
    given: argparse.Namespace, num_layers: int, environment: dict[str, str]
) -> dict | None:
    """What `zjax bench` measures at a depth; None where it does not fit."""
    settings = [*given.settings, f"model.num_layers={num_layers}"]
    command = [sys.executable, "-m", "zjax.main", "bench", f"--config={given.config}"]
    words = [f"--config.{setting}" for setting in settings]
    code, text = call([*command, *words], environment)
    if code and not NO_ROOM.search(text):
        raise SystemExit(text)
    print(f"{num_layers} layers: {'no room' if code else 'trained'}", flush=True)
    if code:
        return None
    return json.loads(re.findall(r"^RESULT (.*)$", text, re.MULTILINE)[-1])


def search(given: argparse.Namespace) -> dict:
    """What the deepest model measures that trains where one layer more does not."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{pool_fraction(given.pool_gigabytes):.6f}"
    }
    code, text = call([sys.executable, *sys.argv, "--estimate"], environment)
    if code:
        raise SystemExit(text)
    num_layers = int(text.split()[-1])
    results: dict[int, dict | None] = {}
    for _ in range(MOST_TRIALS):
        result = results[num_layers] = train(given, num_layers, environment)
        num_layers += 1 if result else -1
        if num_layers in results:
            depth = num_layers if results[num_layers] else num_layers - 1
            found = {"num_layers": depth, "failed_num_layers": depth + 1}
            return (results[depth] or {}) | found
    raise SystemExit(f"no end of the search after {MOST_TRIALS} trials: {[*results]}")


def pool_fraction(gigabytes: float) -> float:
    """The share of a device's memory that JAX may take."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    return gigabytes * 1e9 / (int(sizes.split()[0]) * 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--pool_gigabytes", type=float, required=True)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    if given.estimate:
        print(estimate(given.config, given.settings))
    else:
        print(result_line(search(given)))


if __name__ == "__main__":
    main()
