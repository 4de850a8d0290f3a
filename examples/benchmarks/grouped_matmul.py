"""Grouped matrix products of a mixture of experts, one device.

Against torch's `grouped_mm` at the shapes of Mixtral 8x7B and Qwen3-30B-A3B, where the
rows of the groups follow Zipf's law; and, with few rows per group, where the matrices
are read more slowly than they are multiplied, against the bandwidth of a copy.
"""

import grouped_cases as cases
from contestants import on_one_device
from contests import Case, Contest, Row

OURS = on_one_device("zjax_kernels", "zjax", "grouped_ours")
TORCH = on_one_device("torch grouped_mm", "peer", "grouped_torch")
COPY = on_one_device("copy", "peer", "copy_bandwidth")


def against_torch():
    compared = tuple(
        Case(
            ours=(OURS.name,),
            peer=(TORCH.name,),
            metric=case.metric(which, "TFLOP/s"),
            unit="TFLOP/s",
            must=1.0,
            aim=1.15,
            name=f"{case.name} {which}",
        )
        for case in cases.ZIPF
        for which in cases.PASSES
    )
    return Row(
        "grouped_matmul",
        "Uneven grouped matrix products are as fast as torch's.",
        compared,
        by_devices=False,
    )


def against_copy():
    compared = tuple(
        Case(
            ours=(OURS.name,),
            peer=(COPY.name,),
            metric=cases.SMALL.metric(which, "bytes/s"),
            peer_metric="copy_bytes_per_second",
            unit="bytes/s",
            must=0.65,
            aim=0.85,
            name=which,
        )
        for which in cases.PASSES
    )
    return Row(
        "grouped_matmul_small",
        "Small grouped products run near the speed of a copy.",
        compared,
        notes="128 groups of 128 rows; operands are counted as read once, the result "
        "as written once",
        by_devices=False,
    )


def get_contest():
    rows = against_torch(), against_copy()
    return Contest("Grouped matrix products", (OURS, TORCH, COPY), rows)
