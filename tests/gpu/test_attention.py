"""cuDNN attention against plain attention on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import language
from tests.support.gpu import NEEDS_GPU
from zjax.ops import remat
from zjax.ops.attention import dot_product_attention
from zjax.settings import schema

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


DOCUMENTS = ((0, 37), (37, 128), (128, 228), (228, 256))
"""First and last token of the documents of a packed row, none at an edge of a tile."""


def segments_of_documents():
    lengths = [last - first for first, last in DOCUMENTS]
    return jnp.array(np.repeat(np.arange(1, len(lengths) + 1), lengths)[None])


def assert_near(found, expected, rtol):
    """Compares two arrays by the norm of their difference."""
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= rtol, f"{error:.2e} of an array {expected.shape}"


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_packed_attention_equals_each_document_alone(num_kv_heads):
    """Fails if cuDNN lets documents see each other, forward or backward."""
    q, k, v, d_out = make_inputs(num_kv_heads, batch=1)

    def attend(implementation, q, k, v, **masks):
        return dot_product_attention(
            q, k, v, causal=True, implementation=implementation, **masks
        )

    @jax.jit
    def packed(*inputs):
        masks = {"segment_ids": segments_of_documents()}
        out, vjp = jax.vjp(lambda *x: attend("cudnn", *x, **masks), *inputs)
        return out, *vjp(d_out)

    @jax.jit
    def alone(*inputs):
        parts = []
        for first, last in DOCUMENTS:
            own = [x[:, first:last].astype(jnp.float32) for x in (*inputs, d_out)]
            out, vjp = jax.vjp(lambda *x: attend("xla", *x), *own[:3])
            parts.append((out, *vjp(own[3])))
        return [jnp.concatenate(arrays, 1) for arrays in zip(*parts, strict=True)]

    assert "__cudnn$fmha" in packed.lower(q, k, v).compile().as_text()
    for found, expected in zip(packed(q, k, v), alone(q, k, v), strict=True):
        assert_near(found, expected, 1e-2)


@pytest.mark.parametrize("shape", [language.GPT, language.LLAMA], ids=["gpt", "llama"])
def test_packed_rows_of_a_model_equal_each_document_alone(shape):
    """Fails if cuDNN, positions or the loss mix the documents of a packed row."""
    # The gradient of a bias of keys is 0, which has no relative error.
    config = dataclasses.replace(
        shape,
        use_bias=False,
        embed_size=128,
        mlp_size=256,
        max_length=256,
        attention=schema.Cudnn(),
    )
    text = language.make_text(config, rows=1, length=256)
    graph, state = nnx.split(language.make_language_model(config))
    # Weights of 0.3 are for 16 channels: with 128, scores would saturate the softmax.
    state = jax.tree.map(lambda x: x if x.ndim < 2 else x / 8, state)
    plain, _ = nnx.split(
        language.make_language_model(
            dataclasses.replace(config, attention=schema.Xla())
        )
    )

    def loss(state, graph, batch):
        return language.sums_of(nnx.merge(graph, state), batch).loss_sum

    narrow = jax.tree.map(jnp.bfloat16, state)
    packed = text | {"segment_ids": segments_of_documents()}
    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found, grads = run(narrow, graph, packed)
    assert "__cudnn$fmha" in run.lower(narrow, graph, packed).compile().as_text()
    alone = [
        run(state, plain, {name: x[:, slice(*document)] for name, x in text.items()})
        for document in DOCUMENTS
    ]
    expected, exact = jax.tree.map(lambda *parts: sum(parts), *alone)
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    for grad, right in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert_near(grad, right, 0.03)


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
