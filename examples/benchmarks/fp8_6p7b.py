"""GPT 6.7B with matrices multiplied in float8, against our best in bfloat16."""

import gpt_6p7b
from contestants import compare_speed, zjax
from contests import Contest, Row

STAGES = (2, 3)


def get_contest():
    def ours(dtype, *changes):
        return tuple(
            zjax(
                f"zjax {dtype} ZeRO-{stage}",
                "configs/gpt_6p7b.py",
                *gpt_6p7b.SETTINGS,
                f"zero.stage={stage}",
                *changes,
            )
            for stage in STAGES
        )

    float8 = ours("float8", "precision.matmul_dtype=float8")
    bfloat16 = ours("bfloat16")
    sides = (tuple(each.name for each in side) for side in (float8, bfloat16))
    cases = compare_speed(*sides, 1.15, 1.35)
    claim = "GPT 6.7B: products in float8 are faster than in bfloat16."
    row = Row(
        "fp8_6p7b",
        claim,
        cases,
        headline="GPT 6.7B: float8 over bfloat16",
        by_devices=False,
    )
    return Contest("GPT 6.7B, float8 and bfloat16", (*bfloat16, *float8), (row,))
