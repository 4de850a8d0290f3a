"""Ulysses equals dense attention, by the all-to-alls of the paper and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import attention as reference
from tests.support import sequences as small
from tests.support import sparse as patterns
from zjax.ops import sparse
from zjax.ops.attention import dot_product_attention
from zjax.parallel.sequence import ulysses_attention
from zjax.settings import schema


def make_ulysses(**options):
    def attend(q, k, v, documents):
        return dot_product_attention(
            q, k, v, segment_ids=documents, implementation="xla", **options
        )

    return functools.partial(_call, attend)


def _call(attend, q, k, v, documents=None):
    return ulysses_attention(attend, q, k, v, documents)


@pytest.mark.parametrize(
    ("sizes", "causal", "masked"),
    [
        ({"sequence": 4}, True, True),
        ({"sequence": 2, "tensor": 2}, False, True),
    ],
)
def test_ulysses_is_dense_attention(sizes, causal, masked):
    masks = {"documents": small.make_documents()} if masked else {}
    attend = make_ulysses(causal=causal)
    small.compare(attend, small.make_mesh(**sizes), causal=causal, **masks)


@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    [({"sequence": 2}, 2), ({"sequence": 2, "tensor": 2}, 4), ({"sequence": 4}, 4)],
)
def test_four_all_to_alls_go_each_way(sizes, kv_heads):
    """Two heads of keys are repeated as far as the devices along the heads ask."""
    mesh = small.make_mesh(**sizes)
    compiled, _ = small.compile_with_gradients(make_ulysses(causal=True), mesh)
    parts = mesh.size // mesh.shape["data"]
    few, many = (
        heads * small.LENGTH * small.SIZE // parts for heads in (kv_heads, small.HEADS)
    )
    sizes = 2 * [few, few, many, many]
    assert small.sent(compiled, mesh) == sorted(
        ("all-to-all", "f32", size, ("sequence",), 1) for size in sizes
    )


def test_numbers_of_tokens_are_all_that_is_gathered():
    mesh = small.make_mesh(sequence=4)
    documents = jnp.array(small.make_documents())
    attend = functools.partial(make_ulysses(causal=True), documents=documents)
    compiled, _ = small.compile_with_gradients(attend, mesh)
    sent = {each[:2] for each in small.sent(compiled, mesh)}
    assert sent - {("all-gather", "s32")} == {("all-to-all", "f32")}


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_sparse_attention_keeps_its_pattern_per_head(kind):
    """Fails if a device takes the pattern of the heads of another one."""
    pattern = schema.Bigbird(different_layout_per_head=True)
    attention = dataclasses.replace(patterns.SPARSE, pattern=pattern)
    config = dataclasses.replace(
        patterns.GPT, kind=kind, num_heads=small.HEADS, attention=attention
    )
    live = patterns.mask_of(config)
    length, heads = live.shape[-1], range(small.HEADS)
    assert any((live[0] != live[head]).any() for head in heads)
    rng = np.random.default_rng(0)
    shapes = [(1, length, number, 8) for number in (small.HEADS, 2, 2)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def attend(q, k, v):
        return sparse.sparse_attention(q, k, v, sparse.sparse_of(config))

    with jax.set_mesh(small.make_mesh(sequence=4, tensor=2)):
        out = jax.jit(functools.partial(ulysses_attention, attend))(q, k, v)
    for head in heads:
        kv = head // (small.HEADS // 2)
        one = (x[:, :, i : i + 1] for x, i in ((q, head), (k, kv), (v, kv)))
        expected = reference.attend(*one, live[None, head])
        np.testing.assert_allclose(
            out[:, :, head : head + 1], expected, rtol=1e-5, atol=1e-5
        )
