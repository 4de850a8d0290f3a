"""cuDNN attention against plain attention on the GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import NEEDS_GPU
from zjax.ops.attention import dot_product_attention
from zjax.parallel import remat

pytestmark = NEEDS_GPU


def make_inputs(num_kv_heads, batch=2, length=256, num_heads=4, head_size=64):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [
        jax.random.normal(key, (batch, length, n, head_size), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def value_and_grads(implementation, q, k, v, target, **masks):
    def loss(q, k, v):
        out = dot_product_attention(
            q, k, v, causal=True, implementation=implementation, **masks
        )
        return jnp.mean((out - target).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v).compile()
    return compiled(q, k, v), compiled.as_text()


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "packed"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_cudnn_equals_xla_forward_and_backward(num_kv_heads, masked):
    """Fails if the kernel that was asked for does not run, or is masked wrongly."""
    inputs = make_inputs(num_kv_heads)
    masks = {}
    if masked:
        segments = jnp.repeat(jnp.array([[1, 2, 2, 3], [1, 1, 1, 2]]), 64, axis=1)
        masks = {"segment_ids": segments}
    (value, grads), text = value_and_grads("cudnn", *inputs, **masks)
    (expected, expected_grads), _ = value_and_grads("xla", *inputs, **masks)
    assert "__cudnn$fmha" in text
    np.testing.assert_allclose(value, expected, rtol=2e-3)
    for grad, exact in zip(grads, expected_grads, strict=True):
        grad, exact = (np.asarray(x, np.float32) for x in (grad, exact))
        assert np.linalg.norm(grad - exact) <= 2e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("policy", "kernels"), [("full", 2), ("attention", 1), ("attention_and_mlp", 1)]
)
def test_recomputation_runs_the_forward_kernel_again_only_if_asked(policy, kernels):
    q, k, v, _ = make_inputs(4)

    def block(x):
        return dot_product_attention(x, k, v, causal=True, implementation="cudnn")

    def loss(q):
        return jnp.sum(recomputed(q).astype(jnp.float32) ** 2)

    recomputed = remat.recompute(block, policy, in_loop=False)
    text = jax.jit(jax.grad(loss)).lower(q).compile().as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    forward = [line for line in calls if '__cudnn$fmhaSoftmax"' in line]
    assert len(forward) == kernels
