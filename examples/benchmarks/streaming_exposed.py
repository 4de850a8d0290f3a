"""Exchanges of Streaming DiLoCo that steps on two GPUs do not hide.

GPT-2 124M with 32 x 1024 tokens per device. Each of four fragments goes once in 40
steps, in int4, and is merged five steps later.
"""

from contestants import JAX_MEMORY
from contests import Case, Contest, Contestant, Row

SETTINGS = (
    "directory=runs/streaming_exposed",
    "checkpoint.resume=never",
    "data.source=synthetic",
    "evaluation.every_steps=0",
    "global_batch_size=64",
    "mesh.replica=2",
)
TWO_DEVICES = {"CUDA_VISIBLE_DEVICES": "0,1"}
OURS = Contestant(
    "Streaming DiLoCo",
    (
        "{python}",
        "examples/benchmarks/streaming_rounds.py",
        "configs/gpt2_diloco.py",
        *SETTINGS,
    ),
    "zjax",
    JAX_MEMORY | TWO_DEVICES,
)


def get_contest():
    case = Case(
        ours=(OURS.name,),
        peer=1.0,
        metric="exposed_share",
        unit="times a step",
        must=0.05,
        aim=0.02,
        peer_name="the mean step",
    )
    row = Row(
        "streaming_exposed",
        "Streaming DiLoCo: exchanges hardly lengthen its steps.",
        (case,),
        theme="parallelism",
        higher_is_better=False,
        notes="mean step of whole rounds of 40, less that of as many local steps; "
        "4 fragments in int4; two devices of one host",
        by_devices=False,
    )
    return Contest("Exposed communication", (OURS,), (row,))
