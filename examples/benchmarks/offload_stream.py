"""Optimizer state between host and devices: as fast as the link, on several as on one.

GPT of width 4096 with 12 layers, 1 x 128 tokens per device: a step is its streaming.
"""

from contestants import JAX_MEMORY
from contests import Case, Contest, Contestant, Row

SETTINGS = (
    "model.num_layers=12",
    "model.max_length=128",
    "data.length=128",
    "microbatch_size=1",
    "global_batch_size=0",
    "model.remat=full",
    "zero.stage=2",
    "zero.offload=pinned_host",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
)
STREAMED = "streamed_bytes_per_second"
ONE, SEVERAL = "one device", "all devices"
LINK = "large arrays up and down at once"


def get_contest():
    script, link = (
        ("{python}", f"examples/benchmarks/{name}.py")
        for name in ("streamed_bytes", "host_link")
    )
    command = (*script, "configs/gpt_6p7b.py", *SETTINGS)
    alone = JAX_MEMORY | {"CUDA_VISIBLE_DEVICES": "0"}
    contestants = (
        Contestant(ONE, command, "zjax", alone),
        Contestant(LINK, link, "peer", alone),
        Contestant(SEVERAL, command, "zjax", JAX_MEMORY),
    )
    overlap = Case(
        ours=(ONE,),
        peer=(LINK,),
        metric=STREAMED,
        unit="bytes/s",
        must=0.85,
        aim=0.95,
        peer_metric="link_bytes_per_second",
    )
    scaling = Case(
        ours=(SEVERAL,),
        peer=(ONE,),
        metric=STREAMED,
        unit="bytes/s/device",
        must=0.8,
        aim=0.95,
    )
    rows = (
        Row(
            "offload_overlap",
            "State streams both ways as fast as the link can.",
            (overlap,),
            theme="offload",
            by_devices=False,
        ),
        Row(
            "offload_scaling",
            "Each of several devices streams as fast as one.",
            (scaling,),
            theme="offload",
        ),
    )
    return Contest("State between host and devices", contestants, rows)
