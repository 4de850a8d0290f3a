"""Which axes are left to the compiler, and where tokens are pinned."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, pin_tokens, row_axes


def make_mesh():
    return meshes.make_mesh(schema.Mesh(replica=2, data=2, sequence=2))


def test_axes_split_by_hand_are_not_split_again():
    seen = []

    def look(x):
        seen.append((open_size(meshes.SEQUENCE), open_size(meshes.DATA), row_axes(4)))
        return x

    def trace(*axes):
        spec = P(axes[0] if axes else None)
        mapped = jax.shard_map(
            look, in_specs=spec, out_specs=spec, axis_names={*axes}, check_vma=False
        )
        jax.eval_shape(mapped if axes else look, jnp.ones(8))

    with jax.set_mesh(make_mesh()):
        trace()
        trace(meshes.SEQUENCE)
        trace(meshes.DATA)
    every = (meshes.REPLICA, meshes.DATA, meshes.EXPERT)
    rest = (meshes.REPLICA, meshes.EXPERT)
    assert seen == [(2, 2, every), (1, 2, every), (2, 1, rest)]


def test_rows_are_split_as_far_as_they_divide():
    with jax.set_mesh(make_mesh()):
        assert row_axes(2) == (meshes.REPLICA, meshes.EXPERT)
        assert row_axes(3) == (meshes.EXPERT,)


def test_tokens_are_pinned_where_the_batch_has_them():
    with jax.set_mesh(make_mesh()):
        placed = jax.jit(pin_tokens)(jnp.ones((4, 6, 3)))
        odd = jax.jit(pin_tokens)(jnp.ones((4, 5, 3)))
    assert placed.addressable_shards[0].data.shape == (1, 3, 3)
    assert odd.addressable_shards[0].data.shape == (4, 5, 3)
