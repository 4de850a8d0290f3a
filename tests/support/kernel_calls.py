"""One small call of each kernel of block-sparse attention, to be watched by a tool.

compute-sanitizer --tool memcheck --error-exitcode 9 --report-api-errors no \
    python3 -m tests.support.kernel_calls
"""

import sys

import jax
import jax.numpy as jnp

from tests.kernels.sparse.dense import make_inputs
from zjax_kernels.sparse import (
    BigBird,
    make_plan,
    sparse_attention,
    sparse_attention_gradients,
)

LENGTH, HEADS, HEAD_SIZE, BLOCK = 512, 2, 64, 64


def make_calls(implementation):
    """What runs one kernel each, by name: the others have no result that is read."""
    layout = BigBird(HEADS, BLOCK, attention="unidirectional").layout(LENGTH)
    plan = make_plan(layout, head_size=HEAD_SIZE)
    *qkv, d_out, _ = make_inputs(
        layout, batch=1, head_size=HEAD_SIZE, dtype=jnp.bfloat16
    )
    sums = jnp.zeros((1, HEADS, LENGTH))

    @jax.jit
    def forward():
        return sparse_attention(*qkv, plan, implementation=implementation)

    def gradients():
        return sparse_attention_gradients(
            *qkv, plan, d_out, sums, sums, implementation=implementation
        )

    return {
        "forward": forward,
        "backward_queries": jax.jit(lambda: gradients()[0]),
        "backward_keys": jax.jit(lambda: gradients()[1:]),
    }


def main(implementation="mosaic_gpu"):
    for name, call in make_calls(implementation).items():
        for x in jax.tree.leaves(jax.block_until_ready(call())):
            assert jnp.isfinite(x).all(), name
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
