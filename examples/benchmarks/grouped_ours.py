"""Grouped matrix products of zjax_kernels, timed case by case.

python examples/benchmarks/grouped_ours.py [--only=PART_OF_A_NAME]
"""

import argparse
import functools
from concurrent import futures

import call_timing
import grouped_cases as cases
import jax
import jax.numpy as jnp

from zjax_kernels import grouped_matmul, grouped_outer


def compile_passes(case):
    """Every pass, ready to be called."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (case.num_rows, case.in_size),
        (case.num_groups, case.in_size, case.out_size),
        (case.num_rows, case.out_size),
    )
    x, weights, d_out = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    sizes = jnp.asarray(case.sizes())
    passes = {
        "fwd": (grouped_matmul, x, weights),
        "dgrad": (functools.partial(grouped_matmul, transpose=True), d_out, weights),
        "wgrad": (grouped_outer, x, d_out),
    }
    return {
        which: functools.partial(
            jax.jit(function).lower(*operands, sizes).compile(), *operands, sizes
        )
        for which, (function, *operands) in passes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    chosen = [case for case in (*cases.ZIPF, cases.SMALL) if given.only in case.name]
    with futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(compile_passes, chosen))
    metrics = {}
    for case, passes in zip(chosen, compiled, strict=True):
        for which, call in passes.items():
            seconds = call_timing.time_calls(
                call, jax.block_until_ready, min_calls=cases.CALLS_PER_ROUND
            )
            call_timing.note(f"{case.name} {which}", seconds)
            metrics |= case.describe(which, seconds)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
