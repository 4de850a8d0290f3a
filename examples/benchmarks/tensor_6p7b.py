"""GPT 6.7B with each matrix split over all devices, against torch's tensor parallelism.

python examples/benchmarks/contest.py examples/benchmarks/tensor_6p7b.py
    [--only=zjax,"torch TP"]
"""

import dataclasses

from contestants import compare_speed, tensor, zjax
from contests import Contest, Row
from shape import GPT_6P7B

SHAPE = dataclasses.replace(GPT_6P7B, microbatch_size=4)
OURS = "zjax"
PEERS = {"torch async TP": True, "torch TP": False}


def get_contest():
    contestants = (
        zjax(
            OURS,
            "configs/gpt_6p7b.py",
            "mesh.tensor=-1",
            "mesh.data=1",
            f"microbatch_size={SHAPE.microbatch_size}",
            "global_batch_size=0",
            "model.remat=elementwise",
            "zero.stage=1",
        ),
        *(tensor(name, SHAPE, asynchronous=given) for name, given in PEERS.items()),
    )
    row = Row(
        "tensor_6p7b",
        "GPT 6.7B: tensor parallelism is as fast as torch's, asynchronous or not.",
        compare_speed((OURS,), tuple(PEERS), 1.0, 1.2),
        theme="parallelism",
        headline="GPT 6.7B, matrices split: over torch",
        notes="all devices share 4 x 4096 tokens; two need 141 GB each",
    )
    title = "GPT 6.7B, tensor parallelism, 4 x 4096 tokens"
    return Contest(title, contestants, (row,))
