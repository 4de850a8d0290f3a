"""Which blocks of a line a chunk of a pipeline runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from zjax.parallel.slots import assign_slots


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
