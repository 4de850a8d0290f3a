"""Writes the batch sizes that DeepSpeed's elasticity computes.

python tests/golden/make_elasticity.py FOLDER

FOLDER holds the sources of a deepspeed that keeps all batches within the limit (its
commit 2cfebbda5, in 0.19.6), with torch installed.
"""

import itertools
import json
import os
import pathlib
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, sys.argv[1])

from deepspeed.elasticity import compute_elastic_config

OUTPUT = pathlib.Path(__file__).parent / "elasticity.json"
MICRO_BATCHES = ([2, 4, 6], [1, 2, 4, 8], [3, 5], [7, 11, 13], [16, 20], [17])
LIMITS = (17, 100, 2_000, 10_000)
NODES = (None, 1, 4)
"""GPUs per node of version 0.2; None is version 0.1."""
RANGES = ((1, 10_000), (8, 64))
DEVICES = (1, 2, 3, 8, 12, 20, 64, 100)


def compute(elasticity, number):
    """The batch, microbatch and whether the devices fit."""
    try:
        total, _, size = compute_elastic_config(
            {"elasticity": elasticity}, "0.19.6", number
        )
    except Exception as error:
        return type(error).__name__
    return [int(total), int(size)]


def main():
    cases = []
    grid = itertools.product(MICRO_BATCHES, LIMITS, NODES, RANGES, (True, False))
    for sizes, limit, nodes, (low, high), larger in grid:
        elasticity = {
            "enabled": True,
            "micro_batch_sizes": sizes,
            "max_train_batch_size": limit,
            "min_gpus": low,
            "max_gpus": high,
            "prefer_larger_batch": larger,
            "version": 0.2 if nodes else 0.1,
            "num_gpus_per_node": nodes or 1,
        }
        found = [compute(elasticity, number) for number in DEVICES]
        cases.append({"elasticity": elasticity, "computed": found})
    lines = [json.dumps(case, separators=(",", ":")) for case in cases]
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
