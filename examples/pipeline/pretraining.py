"""Pre-training: the decoder of examples/rl reads Python's standard library, as bytes.

Run: zjax train --config=examples/pipeline/pretraining.py
"""

import pathlib

import zjax

SUPERVISED = pathlib.Path(__file__).parents[1] / "rl" / "supervised.py"


def get_config():
    return zjax.load_config(
        SUPERVISED,
        {
            "directory": "runs/pipeline/pretraining",
            "num_steps": 600,
            "data.source": "standard_library",
            "data.path": "",
            "data.packing": "blocks",
        },
    )
