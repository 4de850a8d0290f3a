"""Block-sparse attention of zjax_kernels, or cuDNN's through JAX, timed case by case.

python examples/benchmarks/sparse_ours.py [--dense] [--only=PART_OF_A_NAME]
"""

import argparse
import functools
from concurrent import futures

import call_timing
import jax
import jax.numpy as jnp
import numpy as np
import sparse_cases as cases
from sparse_cases import Case

import zjax_kernels
from zjax_kernels.sparse import BlockLayout, make_plan

LONG = [
    Case("fixed", 2**14, 128),
    Case("fixed", 2**16, 128),
    Case("bigbird", 2**17, 128),
]
WINDOW = 1024
SLIDING = Case("sliding", 2**15, 64)


def make_inputs(case: Case, heads: int = cases.HEADS, kv_heads: int | None = None):
    keys = jax.random.split(jax.random.key(0), 4)
    kv_heads = kv_heads or heads
    return [
        jax.random.normal(key, (1, case.length, number, case.head_size), jnp.bfloat16)
        for key, number in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    ]


def compile_both(prepare):
    """The forward pass and both, each ready to be called."""
    attend, inputs = prepare()
    *qkv, d_out = inputs

    def forward(qkv):
        return attend(*qkv)

    def both(qkv, d_out):
        return jax.vjp(attend, *qkv)[1](d_out)

    calls = []
    for function, args in ((forward, (qkv,)), (both, (qkv, d_out))):
        compiled = jax.jit(function).lower(*args).compile()
        calls.append(functools.partial(compiled, *args))
    return calls


def time_both(case: Case, calls) -> dict[str, list[float]]:
    """Seconds of the forward pass, and of both."""
    found = {}
    for which, call in zip(cases.PASSES, calls, strict=True):
        found[which] = call_timing.time_calls(call, jax.block_until_ready)
        call_timing.note(case.metric(which), found[which])
    return found


def sparse(plan):
    plan = jax.tree.map(jnp.asarray, plan)
    return lambda q, k, v: zjax_kernels.sparse_attention(
        q, k, v, plan, implementation="mosaic_gpu"
    )


def plan_of(case: Case):
    num_blocks = case.length // cases.BLOCK
    dense = case == cases.BOTH_WAYS
    live = np.ones((num_blocks, num_blocks), bool)
    if not dense:
        live = cases.CAUSAL[case.layout](num_blocks)
    layout = BlockLayout.from_dense(
        live,
        block=cases.BLOCK,
        num_heads=cases.HEADS,
        causal=not dense,
    )
    return make_plan(layout, head_size=case.head_size)


def cudnn(causal: bool):
    return functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )


def sliding_plan():
    num_blocks = SLIDING.length // cases.BLOCK
    rows = np.arange(num_blocks)
    near = rows[:, None] - rows
    live = (near >= 0) & (near <= WINDOW // cases.BLOCK)
    layout = BlockLayout.from_dense(live, block=cases.BLOCK, num_heads=64, causal=True)
    return make_plan(
        layout,
        num_kv_heads=8,
        head_size=64,
        mask=lambda query, key: query - key < WINDOW,
    )


def small_plan():
    live = cases.small(cases.SMALL.length // cases.SMALL_BLOCK)
    return make_plan(
        BlockLayout.from_dense(live, block=cases.SMALL_BLOCK, num_heads=cases.HEADS)
    )


def our_runs():
    for case in (*cases.LAYOUTS, *LONG, cases.BOTH_WAYS):
        yield case, lambda case=case: (sparse(plan_of(case)), make_inputs(case))
    yield SLIDING, lambda: (sparse(sliding_plan()), make_inputs(SLIDING, 64, 8))
    yield cases.SMALL, lambda: (sparse(small_plan()), make_inputs(cases.SMALL))


def dense_runs():
    for case in cases.DENSE:
        attend = cudnn(case != cases.BOTH_WAYS)
        yield case, lambda case=case, attend=attend: (attend, make_inputs(case))
    attend = functools.partial(cudnn(True), local_window_size=(WINDOW - 1, 0))
    yield SLIDING, lambda: (attend, make_inputs(SLIDING, 64, 8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    runs = dense_runs() if args.dense else our_runs()
    chosen = {case: prepare for case, prepare in runs if args.only in case.name}
    with futures.ThreadPoolExecutor() as pool:
        compiled = dict(
            zip(chosen, pool.map(compile_both, chosen.values()), strict=True)
        )
    metrics = {}
    for case, calls in compiled.items():
        metrics |= cases.describe(case, time_both(case, calls))
    if args.dense:
        metrics |= cases.share_of_dense(metrics)
    call_timing.print_result(
        metrics,
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
