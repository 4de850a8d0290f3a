"""Sparse attention whose tokens stay: the whole sequence's, for the blocks it sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import sequences
from tests.support import sparse as patterns
from zjax.errors import ConfigError
from zjax.ops import sparse
from zjax.settings import schema
from zjax.sharding import mesh as meshes

LENGTH, HEADS, SIZE, BLOCK = 512, 4, 8, 32
WINDOW = schema.Local(num_sliding_window_blocks=3)
BIGBIRD = schema.Bigbird()
HEADS_DIFFER = schema.Bigbird(different_layout_per_head=True)


def make_pattern(pattern, kind="decoder"):
    sizes = {"num_heads": HEADS, "max_length": LENGTH}
    attention = schema.Sparse(pattern=pattern, block=BLOCK)
    model = dataclasses.replace(patterns.GPT, kind=kind, attention=attention, **sizes)
    return sparse.sparse_of(model)


def make_arrays(kv_heads=2):
    rng = np.random.default_rng(0)
    shapes = [(2, LENGTH, n, SIZE) for n in (HEADS, kv_heads, kv_heads, HEADS)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def make_masks():
    """Documents, and keys that none sees, in rows that differ."""
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 3, (2, LENGTH)), axis=1).astype(np.int32)
    inside = np.arange(LENGTH) < np.array([[LENGTH - 70], [LENGTH]])
    return {"segment_ids": jnp.array(ids), "key_mask": jnp.array(inside)}


def compile_with_gradients(pattern, mesh, arrays, **masks):
    def run(q, k, v, d_out):
        attend = functools.partial(sparse.sparse_attention, spread=True, **masks)
        out, back = jax.vjp(lambda *x: attend(*x, pattern), q, k, v)
        return out, back(d_out)

    place = NamedSharding(mesh, P(meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR))
    arrays = [jax.device_put(x, place) for x in arrays]
    with jax.set_mesh(mesh):
        jitted = jax.jit(run, out_shardings=(place, (place,) * 3))
        return jitted.lower(*arrays).compile(), arrays


@pytest.mark.parametrize(
    ("sizes", "pattern", "masked"),
    [
        ({"sequence": 4}, make_pattern(BIGBIRD), True),
        ({"sequence": 2, "tensor": 2}, make_pattern(HEADS_DIFFER), False),
        ({"sequence": 4}, make_pattern(BIGBIRD, "encoder"), True),
        ({"sequence": 4, "tensor": 2}, make_pattern(HEADS_DIFFER, "encoder"), True),
    ],
    ids=["causal", "heads-that-differ", "encoder", "tensor"],
)
def test_tokens_that_stay_see_what_they_see_on_one_device(sizes, pattern, masked):
    """Fails if a block is not sent, another is read, or a gradient does not return."""
    arrays, masks = make_arrays(), make_masks() if masked else {}
    mesh = sequences.make_mesh(**sizes)
    compiled, placed = compile_with_gradients(pattern, mesh, arrays, **masks)
    alone = functools.partial(sparse.sparse_attention, **masks)
    expected, back = jax.vjp(lambda *x: alone(*x, pattern), *arrays[:3])
    out, gradients = compiled(*placed)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, back(arrays[3]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_window_sends_the_edge_of_each_device_and_no_more():
    """Fails if whole sequences come together, or heads are traded for tokens."""
    mesh = sequences.make_mesh(sequence=4)
    compiled, _ = compile_with_gradients(make_pattern(WINDOW), mesh, make_arrays())
    edge = 1 * 2 * BLOCK * SIZE  # of one row: two blocks of keys, or two heads of one
    assert (
        sequences.sent(compiled, mesh)
        == [("collective-permute", "f32", edge, ("sequence",), 1)] * 4
    )


@pytest.mark.parametrize(("kv_heads", "length"), [(2, 512), (4, 512), (2, 448)])
def test_tokens_stay_where_heads_cannot_be_shared(kv_heads, length):
    """Fails if attention of your own gathers keys that its pattern never sees."""
    q, k, v, _ = (jnp.array(x[:, :length]) for x in make_arrays(kv_heads))
    mesh = sequences.make_mesh(sequence=4)
    place = NamedSharding(mesh, P(meshes.BATCH_AXES, meshes.SEQUENCE))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *x: sparse.sparse_attention(*x, make_pattern(WINDOW)))
        compiled = run.lower(*(jax.device_put(x, place) for x in (q, k, v))).compile()
    sent = {op for op, *_ in sequences.sent(compiled, mesh)}
    assert (sent == {"collective-permute"}) == ((kv_heads, length) == (2, 512))


@pytest.mark.parametrize(
    ("length", "sizes", "message"),
    [
        (
            448,
            {"sequence": 4},
            "length=448 is not a multiple of 512, 128 tokens for each device along "
            "'sequence'; use 512, or spread=False",
        ),
        (
            512,
            {"tensor": 2},
            "spread=True needs a mesh with several devices along 'sequence', left to "
            "the compiler; use spread=False",
        ),
    ],
)
def test_tokens_that_cannot_stay_are_refused(length, sizes, message):
    q, k, v, _ = (jnp.array(x[:, :length]) for x in make_arrays())
    with jax.set_mesh(sequences.make_mesh(**sizes)):
        with pytest.raises(ConfigError) as error:
            sparse.sparse_attention(q, k, v, make_pattern(BIGBIRD), spread=True)
    assert str(error.value) == message


def test_a_mask_of_tokens_is_refused():
    q, k, v, _ = map(jnp.array, make_arrays())
    with pytest.raises(ConfigError) as error:
        sparse.sparse_attention(
            q, k, v, make_pattern(BIGBIRD), mask=np.tri(LENGTH) > 0, spread=True
        )
    assert str(error.value) == (
        "mask=(512, 512) cannot be used with spread=True; use spread=False"
    )
