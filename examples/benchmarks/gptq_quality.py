"""What GPTQ loses on held-out text, as a share of what rounding to nearest loses.

python examples/benchmarks/gptq_quality.py [--directory=runs/compress_start]
    [--text=runs/compress_start/text] [setting=value ...]
"""

import tempfile

import compress_start
import jax

import zjax
from zjax.checkpoint.store import Store
from zjax.compress.compress import read_rows
from zjax.compress.opened import open_run
from zjax.compress.partial import PartialOutput
from zjax.compress.walk import AFTER, BEFORE, NEAREST, Walk
from zjax.processes.programs import result_line
from zjax.run.compiler import use_program_cache

LEAST_GAP = 0.01
"""Nats that rounding to nearest is to lose, so that a share of them means something."""
SETTINGS = {"method": "gptq", "num_rows": 128, "num_heldout_rows": 128}


def losses(config, weights):
    """Losses on held-out rows by weights as they are, rounded, and by GPTQ."""
    rule = {"weights": weights, "group_size": 128}
    config = zjax.load_config(
        config, {"compress": SETTINGS | {"rules": [rule]}}, "lora=none"
    )
    store = Store(f"{config.directory}/checkpoints")
    opened, _ = open_run(config, "auto", store.resolve(None))
    settings = opened.config.compress
    assert settings is not None
    rows = read_rows(opened.config, settings)
    with tempfile.TemporaryDirectory() as folder:
        output = PartialOutput(f"{folder}/out", {})
        scores = Walk(opened, settings, *rows).run(output).scores
    return {name: score.loss for name, score in scores.items()}


def gaps(found):
    """Losses of rounding to nearest and of GPTQ, over the loss without rounding."""
    return found[NEAREST] - found[BEFORE], found[AFTER] - found[BEFORE]


def measure(config):
    """Shares of the gap, with 4 bits or, if these lose too little, with 3."""
    for weights in ("int4", "int3"):
        found = losses(config, weights)
        nearest, gptq = gaps(found)
        print(f"{weights}: {found}", flush=True)
        if nearest >= LEAST_GAP:
            named = {"nearest_gap": nearest, "gptq_gap": gptq}
            return {"gptq_share": gptq / nearest, "weights": weights} | named
    raise SystemExit(f"rounding to int3 loses less than {LEAST_GAP} nats")


def main(words=None):
    given = compress_start.parse(__doc__, compress_start.DIRECTORY, words)
    use_program_cache()
    more = given.settings
    compress_start.train_start(given.directory, given.text, *more)
    config = compress_start.make_config(given.directory, given.text, *more)
    device = {"device": jax.devices()[0].device_kind, "num_devices": 1}
    print(result_line(device | measure(config)))


if __name__ == "__main__":
    main()
