"""GPT 2.7B on one device, optimizer state on a disk: against DeepSpeed's ZeRO-Infinity.

16 x 1024 tokens per step, blocks recomputed in full. The disk is that of the folder
`runs` of this repository.
"""

import dataclasses
import pathlib

from contestants import ONE_DEVICE, compare_speed, deepspeed, zjax
from contests import Contest, Row
from shape import Shape

SHAPE = Shape(
    num_layers=32,
    embed_size=2560,
    num_heads=32,
    vocab_size=50304,
    length=1024,
    microbatch_size=16,
)
SETTINGS = (
    f"model.num_layers={SHAPE.num_layers}",
    f"model.embed_size={SHAPE.embed_size}",
    f"model.mlp_size={4 * SHAPE.embed_size}",
    f"model.num_heads={SHAPE.num_heads}",
    f"model.num_kv_heads={SHAPE.num_heads}",
    f"model.max_length={SHAPE.length}",
    f"data.length={SHAPE.length}",
    f"microbatch_size={SHAPE.microbatch_size}",
    "global_batch_size=0",
    "model.remat=full",
    "zero.stage=2",
    "zero.offload=nvme",
)


def get_contest():
    folder = pathlib.Path("runs/nvme").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ours = zjax(
        "zjax",
        "configs/gpt_6p7b.py",
        *SETTINGS,
        f"zero.offload.nvme_paths=('{folder}',)",
        environment=ONE_DEVICE,
    )
    options = ("--offload=nvme", f"--nvme_path={folder}", "--recompute")
    theirs = deepspeed(
        "DeepSpeed ZeRO-3", SHAPE, 3, "none", *options, on_one_device=True
    )
    row = Row(
        "nvme_vs_deepspeed",
        "GPT 2.7B, state on a disk: faster than DeepSpeed.",
        compare_speed((ours.name,), (theirs.name,), 1.0, 1.4),
        theme="offload",
        headline="GPT 2.7B, optimizer state on a disk: over DeepSpeed",
        notes="DeepSpeed keeps optimizer state on disks at stage 3 alone",
        by_devices=False,
    )
    ours, theirs = (dataclasses.replace(c, timeout_seconds=900) for c in (ours, theirs))
    return Contest("GPT 2.7B, optimizer state on a disk", (ours, theirs), (row,))
