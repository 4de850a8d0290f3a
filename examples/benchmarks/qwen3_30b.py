"""All 30.5B parameters of Qwen3-30B-A3B on one H200 and its host, 65,536 tokens a step.

Master weights of 32 bits and 8-bit moments: what of them does not fit on the device is
on the host. No clipping, so that updates run under the backward pass.
"""

from contestants import ONE_DEVICE, zjax
from contests import Case, Contest, Row

NAME = "zjax"
SETTINGS = (
    "mesh.expert=1",
    "model.remat=full",
    "zero.offload=auto",
    "optimizer.rule.moment_dtype=int8",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
    "microbatch_size=16",
    "global_batch_size=0",
)
MOST_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97"}
MUST, AIM = 3_000, 12_000
"""Tokens per second; the aim is NVIDIA's published rate per GPU on eight H100s."""


def get_contest():
    config = "configs/qwen3_moe_30b.py"
    speed = Case(
        ours=(NAME,),
        peer=MUST,
        metric="tokens_per_second_per_device",
        unit="tokens/s",
        must=1.0,
        aim=AIM / MUST,
        peer_name="stated bar",
    )
    row = Row(
        "qwen3_30b_one_gpu",
        "Qwen3-30B-A3B, all 30.5B parameters, trains on one H200.",
        (speed,),
        theme="offload",
        headline="Qwen3-30B-A3B on one H200: tokens/s over the bar",
        by_devices=False,
    )
    ours = zjax(NAME, config, *SETTINGS, environment=ONE_DEVICE | MOST_MEMORY)
    return Contest("Qwen3-30B-A3B on one device", (ours,), (row,))
