"""Writes what DeepSpeed makes of public configurations.

python tests/golden/make_deepspeed.py FOLDER

It needs deepspeed, with torch. Each .json of the folder becomes a case of
`deepspeed.json`: its keys and values by dotted path, and what DeepSpeed computes of
them. Sections that DeepSpeed has removed are left out for it alone, and zjax sees them.
Files with placeholders for values are no cases.
"""

import json
import os
import pathlib
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import hjson
from deepspeed.runtime import config as theirs

DEVICES = (8, 2, 1)
"""Numbers of devices, of which a case takes the first that divides its batch."""
OUTPUT = pathlib.Path(__file__).parent / "deepspeed.json"


class Processes:
    """Stands for processes, one per device, of which there are none."""

    def __init__(self, number):
        self.number = number

    def get_rank(self):
        return 0

    def get_world_size(self, group=None):
        return self.number


def leaves(values, prefix=""):
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def has_placeholder(keys):
    texts = (value for value in keys.values() if isinstance(value, str))
    return any("$" in text or text.rstrip(",").isupper() for text in texts)


def compute_on_any(values):
    for number in DEVICES:
        theirs.dist = Processes(number)
        try:
            return compute(values, number)
        except Exception as error:
            last = error
    print(last)
    return {"error": type(last).__name__}


def compute(values, num_devices):
    """What DeepSpeed computes; without sizes where "auto" is left to a trainer."""
    kept = {
        key: value
        for key, value in values.items()
        if key not in theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS
    }
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    sizes = [kept.get(key) for key in (*batch, "gradient_accumulation_steps")]
    if "auto" in sizes:
        for key in (*batch, "gradient_accumulation_steps"):
            kept.pop(key, None)
        kept["train_batch_size"] = num_devices
    found = theirs.DeepSpeedConfig(kept)
    computed = {
        "num_devices": num_devices,
        "stage": found.zero_optimization_stage,
        "optimizer": found.optimizer_name,
        "scheduler": found.scheduler_name,
        "clip": found.gradient_clipping,
        "fp16": found.float16_config.enabled,
        "bf16": found.bfloat16_config.enabled,
        "optimizer_device": device_of(found.zero_config.offload_optimizer),
        "parameter_device": device_of(found.zero_config.offload_param),
    }
    if "auto" not in sizes:
        computed["batch"] = [
            found.train_batch_size,
            found.train_micro_batch_size_per_gpu,
            found.gradient_accumulation_steps,
        ]
    return computed


def device_of(offload):
    device = getattr(offload, "device", "none")
    return getattr(device, "value", device)


def main():
    cases = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
        values = hjson.loads(path.read_text())
        keys = leaves(values)
        if has_placeholder(keys) or keys in [case["keys"] for case in cases.values()]:
            continue
        cases[path.stem] = {"keys": keys, "computed": compute_on_any(values)}
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
