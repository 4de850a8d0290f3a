"""Peers of block-sparse attention in torch: FlexAttention, or dense attention of cuDNN.

python examples/benchmarks/sparse_torch.py [--how=blocks|mask|dense] [--tma]
    [--only=NAME_PART]
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import call_timing
import sparse_cases as cases
import torch
from sparse_cases import Case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

TUNED = {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True}
"""Options of the kernel that every layout here allows: each row sees its own block."""


def make_calls(case: Case, attend) -> dict[str, Callable[[], Any]]:
    """The forward pass, and both."""
    shape = 1, cases.HEADS, case.length, case.head_size
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    qkv = [torch.randn(shape, requires_grad=True, **make) for _ in range(3)]
    d_out = torch.randn(shape, **make)

    def forward():
        with torch.no_grad():
            return attend(*qkv)

    def both():
        return torch.autograd.grad(attend(*qkv), qkv, d_out)

    return {"forward": forward, "both": both}


def time_both(case: Case, attend) -> dict[str, list[float]]:
    """Seconds of the forward pass, and of both."""
    found = {}
    for which, call in make_calls(case, attend).items():
        found[which] = call_timing.time_calls(call, lambda _: torch.cuda.synchronize())
        call_timing.note(case.metric(which), found[which])
    return found


def with_blocks(case: Case, options: dict[str, bool]):
    """Within the blocks that causality cuts, a mask that knows of causality alone."""
    return flex(live_blocks(case), is_causal, options)


def with_mask(case: Case, options: dict[str, bool]):
    """A mask that looks the layout up, as torch documents it for any layout.

    The blocks are those that `create_block_mask` would find with it.
    """
    live = live_blocks(case)

    def is_seen(batch, head, query, key):
        return live[query // cases.BLOCK, key // cases.BLOCK] & (query >= key)

    return flex(live, is_seen, options)


def live_blocks(case: Case) -> torch.Tensor:
    return torch.tensor(cases.CAUSAL[case.layout](case.length // cases.BLOCK)).cuda()


def flex(live: torch.Tensor, sees, options: dict[str, bool]):
    """Whole blocks are told apart from those that causality cuts.

    Torch tries its sizes of tiles and takes the fastest, once for each size of the
    arrays: the layouts of one size differ in their numbers alone.
    """
    is_cut = torch.eye(len(live), dtype=torch.bool, device="cuda")
    mask = BlockMask.from_kv_blocks(
        *in_order(live & is_cut),
        *in_order(live & ~is_cut),
        BLOCK_SIZE=cases.BLOCK,
        mask_mod=sees,
    )
    torch._dynamo.reset()  # every case is compiled, whatever came before it
    compiled = torch.compile(
        flex_attention,
        dynamic=False,
        fullgraph=True,
        mode="max-autotune-no-cudagraphs",
    )
    return functools.partial(compiled, block_mask=mask, kernel_options=options)


def is_causal(batch, head, query, key):
    return query >= key


def in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many there are in each row, and their columns before all others."""
    columns = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


def dense(case: Case, options: dict[str, bool]):
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            causal = case != cases.BOTH_WAYS
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser()
    ways = {"blocks": with_blocks, "mask": with_mask, "dense": dense}
    parser.add_argument("--how", choices=ways, default="blocks")
    parser.add_argument("--tma", action="store_true", help="by the bulk copy engine")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    make = ways[args.how]
    known = cases.DENSE if make is dense else cases.TUNED
    chosen = [case for case in known if args.only in case.name]
    options = TUNED | ({"USE_TMA": True} if args.tma else {})
    metrics = {}
    for case in chosen:
        metrics |= cases.describe(case, time_both(case, make(case, options)))
    if make is dense:
        metrics |= cases.share_of_dense(metrics)
    call_timing.print_result(
        metrics,
        device=torch.cuda.get_device_name(),
        packages=("torch",),
    )


if __name__ == "__main__":
    main()
