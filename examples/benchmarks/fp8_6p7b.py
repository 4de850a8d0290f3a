"""GPT 6.7B with matrices multiplied in float8, against the same in bfloat16."""

import gpt_6p7b
from contestants import compare_speed, zjax

from zjax.bench import Contest, Row

SETTINGS = (*gpt_6p7b.SETTINGS, "zero.stage=3")
FLOAT8, BFLOAT16 = "zjax float8", "zjax bfloat16"


def get_contest():
    config = "configs/gpt_6p7b.py"
    float8 = zjax(FLOAT8, config, *SETTINGS, "precision.matmul_dtype=float8")
    bfloat16 = zjax(BFLOAT16, config, *SETTINGS)
    cases = compare_speed((FLOAT8,), (BFLOAT16,), 1.15, 1.35)
    claim = "GPT 6.7B: products in float8 are faster than in bfloat16."
    rows = (Row("fp8_6p7b", claim, cases, by_devices=False),)
    return Contest("GPT 6.7B, float8 and bfloat16", (bfloat16, float8), rows)
