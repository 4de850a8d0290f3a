"""Grouped matrix products of torch, timed case by case.

python examples/benchmarks/grouped_torch.py [--only=PART_OF_A_NAME]

Each pass is computed with matrices stored as [in, out] and as [out, in]; the faster
counts.
"""

import argparse
import functools

import call_timing
import grouped_cases as cases
import torch
from torch.nn.functional import grouped_mm

DEVICE = "cuda"


def make_passes(case):
    """Every pass, with both ways to store the matrices."""
    torch.manual_seed(0)
    make = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    x = make(case.num_rows, case.in_size)
    d_out = make(case.num_rows, case.out_size)
    weights = make(case.num_groups, case.in_size, case.out_size)
    transposed = weights.mT.contiguous()
    ends = torch.tensor(case.sizes(), device=DEVICE).cumsum(0, dtype=torch.int32)
    pairs = {
        "fwd": ((x, weights), (x, transposed.mT)),
        "dgrad": ((d_out, weights.mT), (d_out, transposed)),
        "wgrad": ((x.T, d_out), (d_out.T, x)),
    }
    return {
        which: {
            order: functools.partial(grouped_mm, *pair, offs=ends)
            for order, pair in zip(("[in, out]", "[out, in]"), both, strict=True)
        }
        for which, both in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    metrics = {}
    for case in cases.ZIPF:
        if given.only not in case.name:
            continue
        for which, orders in make_passes(case).items():
            seconds = call_timing.time_fastest(
                orders,
                lambda _: torch.cuda.synchronize(),
                f"{case.name} {which}",
                min_calls=cases.CALLS_PER_ROUND,
            )
            metrics |= case.describe(which, seconds)
    call_timing.print_result(
        metrics, device=torch.cuda.get_device_name(), packages=("torch",)
    )


if __name__ == "__main__":
    main()
