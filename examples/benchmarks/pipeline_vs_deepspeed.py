"""GPT 6.7B in a pipeline over all devices, against DeepSpeed's PipelineModule.

python examples/benchmarks/contest.py examples/benchmarks/pipeline_vs_deepspeed.py
    [--only="zjax 1F1B"]
"""

import dataclasses
import itertools

from contestants import compare_speed, pipeline, zjax
from contests import Contest, Row
from pipeline_bubble import CONFIG, IN_STAGES
from shape import GPT_6P7B

SHAPE = dataclasses.replace(GPT_6P7B, microbatch_size=1)
NUM_MICROBATCHES = 16
OURS = {"zjax 1F1B": "full", "zjax 1F1B keeping products": "elementwise"}
"""What is computed again."""
PEERS = {
    "DeepSpeed": ("none", "--recompute"),
    "DeepSpeed keeping all": ("none",),
    "DeepSpeed compiled keeping all": ("blocks_and_loss",),
}


def get_contest():
    def ours(name, remat):
        return zjax(
            name,
            CONFIG,
            *IN_STAGES,
            f"model.remat={remat}",
            f"microbatch_size={SHAPE.microbatch_size}",
            f"num_microbatches={NUM_MICROBATCHES}",
            "global_batch_size=0",
            "zero.stage=1",
        )

    peers = (pipeline(n, SHAPE, NUM_MICROBATCHES, *way) for n, way in PEERS.items())
    row = Row(
        "pipeline_vs_deepspeed",
        "GPT 6.7B: a pipeline is faster than DeepSpeed's.",
        compare_speed(tuple(OURS), tuple(PEERS), 1.1, 1.3),
        theme="parallelism",
        headline="GPT 6.7B in a pipeline: over DeepSpeed",
        notes="1F1B on both sides, gradients summed in float32; the faster way "
        "of each, with blocks computed again or not; two stages need 141 GB per device",
    )
    title = "GPT 6.7B in a pipeline, 16 x 4096 tokens"
    return Contest(title, (*itertools.starmap(ours, OURS.items()), *peers), (row,))
