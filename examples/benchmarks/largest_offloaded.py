"""The largest GPT of width 8192 on one device: with the host and a disk, over without.

1 x 1024 tokens per step, blocks recomputed in full. The depth with offload is what a
device of 141 GB and a host of 512 GiB hold with 36 GB of a disk, or one of 256 GiB with
50 GB, where a step takes a minute or more, at 12 bytes for each parameter. The disk is
that of the folder `runs` of this repository.
"""

import os
import pathlib

from contests import Case, Contest, Contestant, Row

DEPTHS = {500: 62, 0: 39}
"""By the GiB of a host, or more."""
POOL_SHARE = 0.94
POOL_GIGABYTES = 141.7
"""That share of an H200."""
SETTINGS = (
    "model.embed_size=8192",
    "model.mlp_size=32768",
    "model.num_heads=64",
    "model.num_kv_heads=64",
    "model.max_length=1024",
    "data.length=1024",
    "microbatch_size=1",
    "global_batch_size=0",
    "model.remat=full",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
)
ALONE, OFFLOADED = "device alone", "device with host and disk"


def get_contest():
    scripts, folder = "examples/benchmarks", pathlib.Path("runs/nvme").absolute()
    search = ("largest_model.py", f"--pool_gigabytes={POOL_GIGABYTES}")
    num_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    depth = next(DEPTHS[least] for least in DEPTHS if num_gib >= least)
    places = (
        f"model.num_layers={depth}",
        "zero.offload=auto",
        "zero.offload.parameter_memory=pinned_host",
        f"zero.offload.nvme_paths=('{folder}',)",
    )

    def contestant(name, script, *changes):
        command = ("{python}", f"{scripts}/{script[0]}", *script[1:])
        environment = {
            "CUDA_VISIBLE_DEVICES": "0",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(POOL_SHARE),
        }
        words = (*command, "configs/gpt_6p7b.py", *SETTINGS, *changes)
        return Contestant(name, words, "zjax", environment, timeout_seconds=1200)

    case = Case(
        ours=(OFFLOADED,),
        peer=(ALONE,),
        metric="num_params",
        unit="parameters",
        must=4.0,
        aim=6.0,
    )
    row = Row(
        "largest_model_1gpu",
        "Host and disk let one device train a larger GPT.",
        (case,),
        theme="offload",
        headline="Largest GPT on one device: host and disk, over without",
        notes="three steps each way; `used_bytes` of the record is what the offloaded "
        "one takes of the device, the host and the disk",
        by_devices=False,
    )
    contestants = (
        contestant(ALONE, search, "zero.stage=0"),
        contestant(OFFLOADED, ("three_steps.py",), "zero.stage=2", *places),
    )
    return Contest("Largest GPT of width 8192 on one device", contestants, (row,))
