"""GPT 6.7B on two stages with matrices on two devices, over ZeRO-3 on the data alone.

Needs a multiple of four devices.

python examples/benchmarks/contest.py examples/benchmarks/three_d.py
    [--only="three dimensions"]
"""

from contestants import compare_speed, zjax
from contests import Contest, Row

SETTINGS = (
    "microbatch_size=1",
    "global_batch_size={devices}",
    "model.remat=elementwise",
)
SPLIT = (
    "mesh.pipeline=2",
    "mesh.tensor=2",
    "pipeline.recompute=False",
    "zero.stage=1",
)
OURS, DATA_ALONE = "three dimensions", "data alone"


def get_contest():
    config = "configs/gpt_6p7b.py"
    contestants = (
        zjax(OURS, config, *SETTINGS, *SPLIT),
        zjax(DATA_ALONE, config, *SETTINGS, "zero.stage=3"),
    )
    row = Row(
        "three_d",
        "GPT 6.7B: stages, matrices and data with ZeRO-1, over ZeRO-3 on data alone.",
        compare_speed((OURS,), (DATA_ALONE,), None, 1.0),
        theme="parallelism",
        headline="GPT 6.7B in three dimensions: over ZeRO-3",
        notes="2 stages x 2 shares of each matrix, the data on the rest; "
        "1 x 4096 tokens per device",
    )
    title = "GPT 6.7B in three dimensions, 1 x 4096 tokens per device"
    return Contest(title, contestants, (row,))
