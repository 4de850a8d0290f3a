"""Ulysses on cuDNN, rings and halos on the kernels of Hopper, on several GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.gpu import NEEDS_HOPPER
from zjax.ops import sparse
from zjax.ops.attention import dot_product_attention
from zjax.parallel.ring import ring_attention, zigzag
from zjax.parallel.sequence import ulysses_attention
from zjax.settings import schema
from zjax.sharding import mesh as meshes

pytestmark = NEEDS_HOPPER
ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 2048, 8, 2, 128
MARKS = {
    "ulysses": ("all-to-all", "__cudnn$fmha"),
    "ring": ("collective-permute", "mosaic_gpu"),
}
"""How a program shows what it sends, and which kernel runs."""


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() not in (2, 4, 8):
        pytest.skip("needs 2, 4 or 8 GPUs")
    return meshes.make_mesh(schema.Mesh(data=1, sequence=-1))


def make_arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        jax.random.normal(key, (ROWS, LENGTH, number, SIZE), jnp.bfloat16)
        for key, number in zip(keys, heads, strict=True)
    ]


def make_documents():
    numbers = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, 5)
    return jnp.sort(numbers, axis=1).astype(jnp.int32)


def with_gradients(attend, q, k, v, d_out, documents):
    out, back = jax.vjp(lambda *qkv: attend(*qkv, documents), q, k, v)
    return out, *back(d_out)


def expected_of(causal, arrays, documents):
    """In float32, on one device."""

    def attend(q, k, v, documents):
        return dot_product_attention(
            q, k, v, causal=causal, segment_ids=documents, implementation="xla"
        )

    wide = (x.astype(jnp.float32) for x in arrays)
    return jax.jit(functools.partial(with_gradients, attend))(*wide, documents)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_both_ways_are_attention(mesh, way, causal, packed):
    def attend(q, k, v, documents):
        if way == "ring":
            return ring_attention(q, k, v, causal=causal, segment_ids=documents)

        def whole(q, k, v, documents):
            return dot_product_attention(
                q, k, v, causal=causal, segment_ids=documents, implementation="cudnn"
            )

        return ulysses_attention(whole, q, k, v, documents)

    arrays, documents = make_arrays(), make_documents() if packed else None
    expected = expected_of(causal, arrays, documents)
    order = np.arange(LENGTH)
    if causal and way == "ring":
        order = zigzag(LENGTH, mesh.size)
    place = NamedSharding(mesh, P(None, meshes.SEQUENCE))
    given = jax.tree.map(
        lambda x: jax.device_put(x[:, order], place), (*arrays, documents)
    )
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(with_gradients, attend), out_shardings=place)
        compiled = run.lower(*given).compile()
        found = compiled(*given)
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float32)[:, np.argsort(order)]
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error < 1e-2
    text = compiled.as_text()
    sent, kernel = MARKS[way]
    assert sent in text
    assert kernel in text
    gathered = [line for line in text.splitlines() if " all-gather" in line]
    assert not [line for line in gathered if "bf16" in line]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("axis", [meshes.SEQUENCE, meshes.TENSOR])
def test_devices_that_share_tokens_or_heads_have_their_own(mesh, kind, axis):
    """Fails if a kernel computes heads that its device does not have."""
    mesh = meshes.make_mesh(schema.Mesh(data=1, **{axis: mesh.size}))
    model = schema.Model(
        kind=kind,
        num_heads=HEADS,
        max_length=LENGTH,
        attention=schema.Sparse(pattern=schema.Bigbird(different_layout_per_head=True)),
    )
    pattern = sparse.sparse_of(model)
    positions = jnp.arange(LENGTH)[None]
    mask = sparse.visible_keys(pattern, positions, positions)

    def dense(q, k, v, documents):
        seen = mask & (documents[:, None, :, None] == documents[:, None, None])
        return jax.nn.dot_product_attention(q, k, v, mask=seen, implementation="xla")

    def spread(q, k, v, documents):
        return sparse.sparse_attention(
            q,
            k,
            v,
            pattern,
            segment_ids=documents,
            spread=axis == meshes.SEQUENCE,
        )

    arrays, documents = make_arrays(), make_documents()
    wide = [x.astype(jnp.float32) for x in arrays]
    expected = jax.jit(functools.partial(with_gradients, dense))(*wide, documents)
    spec = (None, axis) if axis == meshes.SEQUENCE else (None, None, axis)
    place = NamedSharding(mesh, P(*spec))
    given = [jax.device_put(x, place) for x in arrays]
    given.append(jax.device_put(documents, NamedSharding(mesh, P(*spec[:2]))))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(with_gradients, spread), out_shardings=place)
        compiled = run.lower(*given).compile()
        found = compiled(*given)
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float32)
        assert np.linalg.norm(one - other) < 1e-2 * np.linalg.norm(other)
    text = compiled.as_text()
    assert ("collective-permute" in text) == (axis == meshes.SEQUENCE)
    assert "mosaic_gpu" in text
    assert "all-to-all" not in text
