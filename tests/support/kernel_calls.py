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

LENGTH, HEADS, BLOCK = 512, 2, 64
FUSED, APART = 64, 96
"""Head sizes whose backward pass is one kernel, and two."""


def make_calls(implementation):
    """What runs one kernel each, by name: the others have no result that is read."""
    layout = BigBird(HEADS, BLOCK, attention="unidirectional").layout(LENGTH)
    sums = jnp.zeros((1, HEADS, LENGTH))

    def prepare(head_size):
        plan = make_plan(layout, head_size=head_size)
        *arrays, _ = make_inputs(
            layout, batch=1, head_size=head_size, dtype=jnp.bfloat16
        )
        return plan, arrays

    def forward():
        plan, (*qkv, _) = prepare(FUSED)
        return sparse_attention(*qkv, plan, implementation=implementation)

    def gradients(head_size):
        plan, (*qkv, d_out) = prepare(head_size)
        return sparse_attention_gradients(
            *qkv, plan, d_out, sums, sums, implementation=implementation
        )

    calls = {
        "forward": forward,
        "backward": lambda: gradients(FUSED),
        "backward_queries": lambda: gradients(APART)[0],
        "backward_keys": lambda: gradients(APART)[1:],
    }
    return {name: jax.jit(call) for name, call in calls.items()}


def main(implementation="mosaic_gpu"):
    for name, call in make_calls(implementation).items():
        for x in jax.tree.leaves(jax.block_until_ready(call())):
            assert jnp.isfinite(x).all(), name
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
