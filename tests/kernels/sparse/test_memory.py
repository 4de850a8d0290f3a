"""Memory of attention without the kernels grows with the length, not its square."""

import jax
import jax.numpy as jnp
import pytest

from zjax_kernels.sparse import BigBird, make_plan, sparse_attention


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_memory_per_token_is_that_of_a_short_sequence(passes):
    """Fails if scores of all pairs exist at a time, or those of all blocks."""
    short, long = (bytes_per_token(length, passes) for length in (1024, 8192))
    assert long <= short


def bytes_per_token(length, passes):
    plan = make_plan(BigBird(2, block=64, attention="unidirectional").layout(length))
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def total(q, k, v):
        return sparse_attention(q, k, v, plan, implementation="reference").sum()

    run = total if passes == "forward" else jax.grad(total, argnums=(0, 1, 2))
    memory = jax.jit(run).lower(x, x, x).compile().memory_analysis()
    return memory.temp_size_in_bytes / length
