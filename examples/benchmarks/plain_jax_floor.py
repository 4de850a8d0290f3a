"""Twelve layers of GPT-2 1.5B: zjax must not fall below ZeRO written by hand in JAX.

Of all 48 layers, unrolled as a page of JAX has them, compilation alone takes minutes.
"""

import dataclasses

from contestants import compare_speed, plain_jax, zjax
from contests import Contest, Row
from gpt_1p5b import SETTINGS, SHAPE

SHORT = dataclasses.replace(SHAPE, num_layers=12)
STAGES = (2, 3)


def get_contest():
    layers = f"model.num_layers={SHORT.num_layers}"
    ours = tuple(
        zjax(
            f"zjax ZeRO-{stage}",
            "configs/gpt2_1p5b.py",
            *SETTINGS,
            layers,
            f"zero.stage={stage}",
        )
        for stage in STAGES
    )
    theirs = tuple(plain_jax(f"plain JAX ZeRO-{s}", SHORT, s) for s in STAGES)
    names = (tuple(each.name for each in side) for side in (ours, theirs))
    row = Row(
        "plain_jax_floor",
        "GPT of 12 layers: ZeRO is no slower than plain JAX.",
        compare_speed(*names, 1.0, None),
    )
    return Contest("12 layers of GPT 1.5B", (*ours, *theirs), (row,))
