"""Which blocks and microbatches a pipeline computes, and in which ticks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zjax.parallel.pipeline import make_feed, where_due
from zjax.parallel.pipeline_schedule import IDLE
from zjax.parallel.slots import assign_slots

AXES = ("replica", "data")
WEIGHTS = np.float32([[0, 0], [2, 0], [0, 5], [0, 0]])
"""Of two microbatches on each of four devices."""
COMPUTED = [[5, 5], [2, 2], [5, 5], [5, 5]]


def batch_of(number):
    """Arrays of all kinds, which tell the microbatch and the device; of 0 infinite."""
    return {
        "tokens": jnp.full((3, 2), number, jnp.int32),
        "mask": jnp.arange(8) == number,
        "image": jnp.full((1, 4), jnp.log(number), jnp.bfloat16),
        "bytes": jnp.uint8(100 + number),
    }


def test_devices_without_weight_compute_the_heaviest_of_all():
    """Fails if one computes what counts nothing, another's than the heaviest, or what
    was rounded or mixed on its way; or if one that has weight does not keep its own."""
    names = (*AXES, "pipeline")
    mesh = jax.make_mesh((2, 2, 2), names, (AxisType.Auto,) * 3)

    def run(microbatches, weights):
        feed = make_feed(*jax.tree.map(lambda x: x[0], (microbatches, weights)), AXES)
        batches = jax.vmap(feed.batch)(jnp.arange(2))
        return jax.tree.map(lambda x: x[None], (batches, feed.weights))

    parts = jax.vmap(jax.vmap(batch_of))(jnp.arange(8).reshape(4, 2))
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=P(AXES),
        out_specs=P(AXES),
        axis_names=set(AXES),
        check_vma=False,
    )
    found, weights = jax.jit(mapped)(parts, WEIGHTS)
    wanted = jax.vmap(jax.vmap(batch_of))(jnp.array(COMPUTED))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(
        lambda x: x.dtype, parts
    )
    np.testing.assert_array_equal(weights, WEIGHTS)


@pytest.mark.parametrize(
    ("ticks", "operations"),
    [((3, 4), {"mul", "max"}), ((IDLE, IDLE), {"cond"}), ((3, IDLE), {"cond"})],
)
def test_what_is_due_in_all_ticks_needs_no_condition(ticks, operations):
    def run(number, total):
        return where_due(np.array(ticks), number, lambda n, x: n * x, total)

    equations = jax.make_jaxpr(run)(jnp.int32(3), jnp.int32(2)).eqns
    found = {each.primitive.name for each in equations}
    assert found >= operations
    assert "cond" in operations or "cond" not in found


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "num_blocks", [(5,), (8,), (1, 7), (4, 4), (3, 58), (2, 1, 6), (1, 1, 1, 1)]
)
def test_every_block_has_one_slot_and_blocks_keep_their_order(num_blocks, num_chunks):
    slots = assign_slots(num_blocks, num_chunks, [1] * len(num_blocks))
    found = []
    for chunk in range(num_chunks):
        for own in slots:
            numbers = [own.block(chunk, slot) for slot in range(own.size)]
            real = [n for n in numbers if 0 <= n < own.num_blocks]
            found += [own.first_block + n for n in real]
    assert found == list(range(sum(num_blocks)))


@pytest.mark.parametrize(
    ("num_blocks", "num_chunks", "block_sizes", "sizes"),
    [
        ((8,), 4, [1], (2,)),
        ((1, 26), 4, [1, 1], (1, 7)),
        ((4, 4), 2, [1, 2], (4, 2)),
        ((4, 4), 2, [2, 1], (2, 4)),
        ((4, 4), 1, [1, 1], (4, 4)),
    ],
)
def test_chunks_have_as_few_slots_as_they_can(
    num_blocks, num_chunks, block_sizes, sizes
):
    """Fails if a stage takes longer than it must, or of two ways holds more."""
    slots = assign_slots(num_blocks, num_chunks, block_sizes)
    assert tuple(own.size for own in slots) == sizes


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_arrays_are_put_into_slots_and_collected_again(padding):
    """Fails if a block lies in another slot than it is run in."""
    for own in assign_slots((3, 6), 4, (1, 1)):
        blocks = np.arange(1, own.num_blocks + 1)
        x = jnp.pad(blocks, (0, padding))[:, None]
        spread = own.spread(x)
        by_chunk = spread.reshape(4, own.size)
        for chunk in range(4):
            for slot in range(own.size):
                number = own.block(chunk, slot)
                is_block = 0 <= number < own.num_blocks
                assert by_chunk[chunk, slot] == (number + 1 if is_block else 0)
        np.testing.assert_array_equal(own.collect(spread, len(x)), x)
