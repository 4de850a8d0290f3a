"""Peers of block-sparse attention in torch: FlexAttention, or dense attention of cuDNN.

python examples/benchmarks/sparse_torch.py [--dense] [--only=PART_OF_A_NAME]
"""

import argparse
import platform
from importlib import metadata

import sparse_cases as cases
import torch
from sparse_cases import Case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention


def time_both(case: Case, attend) -> dict[str, list[float]]:
    """Seconds of the forward pass, and of both."""
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

    found = {}
    for which, call in (("forward", forward), ("both", both)):
        found[which] = cases.time_calls(call, lambda _: torch.cuda.synchronize())
        cases.note(case.metric(which), found[which])
    return found


def flex(case: Case):
    live = torch.tensor(cases.CAUSAL[case.layout](case.length // cases.BLOCK)).cuda()

    def sees(batch, head, query, key):
        return live[query // cases.BLOCK, key // cases.BLOCK] & (query >= key)

    length = case.length
    mask = create_block_mask(
        sees,
        None,
        None,
        length,
        length,
        device="cuda",
        BLOCK_SIZE=cases.BLOCK,
        _compile=True,
    )
    torch._dynamo.reset()  # every case is compiled, whatever came before it
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def dense(case: Case):
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            causal = case != cases.BOTH_WAYS
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    make = dense if args.dense else flex
    metrics = {}
    for case in cases.DENSE if args.dense else cases.LAYOUTS:
        if args.only in case.name:
            seconds = time_both(case, make(case))
            metrics |= cases.describe(case, seconds)
    if args.dense:
        metrics |= cases.share_of_dense(metrics)
    cases.print_result(
        metrics,
        device=torch.cuda.get_device_name(),
        versions={
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
        },
    )


if __name__ == "__main__":
    main()
