"""Schedules of pipelines that waste less than 1F1B, over that.

python examples/benchmarks/contest.py examples/benchmarks/pipeline_schedules.py
    [--only=1F1B,ZB-H1]
"""

from contestants import zjax
from contests import Case, Contest, Row
from pipeline_bubble import CONFIG, IN_STAGES, MODEL

SETTINGS = (
    *MODEL,
    *IN_STAGES,
    "model.remat=none",
    "data.length=2048",
    "num_microbatches=8",
)
PLAIN = "1F1B"
SCHEDULES = {PLAIN: "1f1b", "interleaved": "interleaved", "ZB-H1": "zb_h1"}


def get_contest():
    contestants = tuple(
        zjax(name, CONFIG, *SETTINGS, f"pipeline={schedule}")
        for name, schedule in SCHEDULES.items()
    )

    def case(name):
        sides = ((name,), (PLAIN,))
        return Case(*sides, "step_seconds", "seconds", must=1.0, aim=0.9, name=name)

    row = Row(
        "pipeline_schedules",
        "Schedules that waste less than 1F1B are faster.",
        tuple(case(name) for name in SCHEDULES if name != PLAIN),
        theme="parallelism",
        higher_is_better=False,
        notes="nothing is computed again; where all passes take equally long, the "
        "schedules allow 0.94 and 0.96 on two stages, 0.86 and 0.91 on four",
    )
    title = "16 layers of GPT 6.7B in a pipeline, 8 x 2048 tokens"
    return Contest(title, contestants, (row,))
