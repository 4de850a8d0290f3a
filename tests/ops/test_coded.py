"""Collectives of packed codes, compared with NumPy arrays of every rank."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zjax.ops import packed
from zjax.settings import schema
from zjax.sharding import mesh as meshes

NODES, DEVICES = 2, 4
INT4, INT8 = packed.CODECS["int4"], packed.CODECS["int8"]
RANKS = NODES * DEVICES
SHAPE = (40, 1_000)
"""Of a term: a shard of 5,000 elements is no whole number of blocks."""


def mapped(run, in_specs, out_specs):
    mesh = meshes.make_mesh(schema.Mesh(replica=NODES, data=DEVICES))
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    )


def spec_of(dim):
    axes = "data", "replica"
    return P(axes, None) if dim == 0 else P(None, axes)


def quantise(x, codec):
    """A vector whose blocks are rounded to multiples of their scales, in float32."""
    levels = np.float32(2 ** (codec.bits - 1))
    blocks = np.pad(x, (0, -len(x) % codec.block)).reshape(-1, codec.block)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / levels
    scales[scales == 0] = 1
    codes = np.clip(np.rint(blocks * (1 / scales)), -levels, levels - 1)
    return (codes * scales).reshape(-1)[: len(x)]


SLOT = [p % DEVICES * NODES + p // DEVICES for p in range(RANKS)]
"""The shard of each rank."""


def emulate(terms):
    """The shard of the sum that each rank gets, for the shards of terms [rank, 8, n].

    Reference: steps 1 to 3 of qgZ, with the arrays of every rank by themselves.
    """
    inside = np.zeros((RANKS, NODES, terms.shape[2]), np.float32)
    for rank in range(RANKS):  # what it receives from the devices of its node
        node, device = divmod(rank, DEVICES)
        for target in range(NODES):
            shard = SLOT[target * DEVICES + device]
            for sender in range(node * DEVICES, (node + 1) * DEVICES):
                inside[rank, target] += quantise(terms[sender, shard], INT4)
    result = np.zeros((RANKS, terms.shape[2]), np.float32)
    for rank in range(RANKS):  # what it receives from the same device of each node
        node, device = divmod(rank, DEVICES)
        for other in range(NODES):
            result[rank] += quantise(inside[other * DEVICES + device, node], INT4)
    return result


def make_shards(size):
    """Shards of terms [rank, 8, size] whose sums are exact in any order.

    The largest number of each block is a power of two, so that codes times scales are.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RANKS, RANKS, size)).astype(np.float32)
    for start in range(0, size, INT4.block):
        block = x[..., start : start + INT4.block]
        powers = 2.0 ** rng.integers(-3, 4, (RANKS, RANKS, 1))
        block *= powers / np.abs(block).max(axis=2, keepdims=True)
        block[..., :1] = np.sign(block[..., :1]) * powers
    return x


def make_terms():
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.1, 10, (RANKS, 1, SHAPE[1]))
    return (columns * rng.normal(size=(RANKS, *SHAPE))).astype(np.float32)


@pytest.mark.parametrize("dim", [0, 1])
def test_reduction_equals_every_rank_by_hand(dim):
    """Fails for the scale of another chunk, a mean, or other hops."""
    assert [SLOT.index(shard) for shard in range(RANKS)] == [0, 4, 1, 5, 2, 6, 3, 7]
    axes = ("data", "replica")
    shape = [*SHAPE]
    shape[dim] //= RANKS

    def run(term):
        return packed.reduce_scatter_codes(term[0], axes, dim, INT4)

    shards = make_shards(np.prod(shape))
    by_shard = shards.swapaxes(0, 1).reshape(RANKS, RANKS, *shape)
    terms = np.concatenate(by_shard, axis=1 + dim)
    found = mapped(run, P(("replica", "data")), spec_of(dim))(terms)
    for shard, expected in zip(found.addressable_shards, emulate(shards), strict=True):
        assert shard.index[dim].start // shape[dim] == SLOT[shard.device.id]
        np.testing.assert_array_equal(shard.data, expected.reshape(shape))


def test_reduction_is_within_the_two_half_steps():
    """Fails for a mean in place of a sum, or if some values are coded three times."""
    axes = ("data", "replica")
    terms = make_terms()

    def run(term):
        return packed.reduce_scatter_codes(term[0], axes, 0, INT4)

    found = np.asarray(mapped(run, P(("replica", "data")), P(axes))(terms))
    # A code is wrong by a half step, and by a step where it is the positive maximum.
    inside = np.abs(terms).max(axis=(1, 2)).sum() / 8
    by_node = terms.reshape(NODES, DEVICES, *SHAPE).sum(axis=1)
    across = sum(np.abs(total).max() + inside for total in by_node) / 8
    error = np.abs(found - terms.sum(axis=0))
    assert error.max() <= inside + across
    assert np.abs(found).max() > inside + across  # that is less than the numbers


def test_zeros_stay_zeros():
    def run(term):
        return packed.reduce_scatter_codes(term[0], ("data", "replica"), 0, INT4)

    terms = np.zeros((RANKS, *SHAPE), np.float32)
    found = mapped(run, P(("replica", "data")), P(("data", "replica")))(terms)
    assert not np.asarray(found).any()


@pytest.mark.parametrize("dim", [0, 1])
def test_gather_equals_coded_shards(dim):
    """Fails if a shard is decoded by the scales of another, or comes elsewhere."""
    axes = ("data", "replica")

    def run(shard):
        return packed.all_gather_codes(shard, axes, dim, INT8)

    x = make_terms()[0]
    found = np.asarray(mapped(run, spec_of(dim), P())(x))
    shards = np.split(x, RANKS, axis=dim)
    expected = [quantise(s.reshape(-1), INT8).reshape(s.shape) for s in shards]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=dim))
    assert 0 < np.abs(found - x).max() <= 1.001 * np.abs(x).max() / 128
