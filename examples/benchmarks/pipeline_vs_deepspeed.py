"""GPT 6.7B in a pipeline over all devices, against DeepSpeed's PipelineModule.

zjax bench --contest=examples/benchmarks/pipeline_vs_deepspeed.py
zjax bench --contest=examples/benchmarks/pipeline_vs_deepspeed.py --only="zjax 1F1B"
"""

import dataclasses

from contestants import compare_speed, pipeline, zjax
from pipeline_bubble import BY_BLOCK, CONFIG, IN_STAGES
from shape import GPT_6P7B

from zjax.bench import Contest, Row

SHAPE = dataclasses.replace(GPT_6P7B, microbatch_size=1)
NUM_MICROBATCHES = 16
OURS = "zjax 1F1B"
PEERS = {
    "DeepSpeed": ("none", "parameters"),
    "DeepSpeed compiled": ("blocks_and_loss", "parameters"),
    "DeepSpeed compiled and cut by blocks": ("blocks_and_loss", "type:block"),
}


def get_contest():
    contestants = (
        zjax(
            OURS,
            CONFIG,
            *IN_STAGES,
            *BY_BLOCK,
            f"microbatch_size={SHAPE.microbatch_size}",
            f"num_microbatches={NUM_MICROBATCHES}",
            "global_batch_size=0",
            "zero.stage=1",
        ),
        *(
            pipeline(name, SHAPE, NUM_MICROBATCHES, compiled, partition)
            for name, (compiled, partition) in PEERS.items()
        ),
    )
    row = Row(
        "pipeline_vs_deepspeed",
        "GPT 6.7B: a pipeline is faster than DeepSpeed's.",
        compare_speed((OURS,), tuple(PEERS), 1.1, 1.3),
        notes="1F1B on both sides, gradients summed in float32; each block is computed "
        "again; two stages need 141 GB per device",
    )
    title = "GPT 6.7B in a pipeline, 16 x 4096 tokens"
    return Contest(title, contestants, (row,))
