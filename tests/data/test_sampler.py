import collections

import numpy as np
import pytest

from tests.reference import sampling
from zjax.data import draws


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 1000])
def test_order_equals_the_oracle(num_rows):
    order = draws.Sampler(seed=5, num_rows=num_rows, global_batch_size=6)
    for step in (0, 1, 37):
        expected = sampling.batch(step, num_rows, 5, 6)
        assert order.indices(step).tolist() == expected


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17, 1023, 5000])
def test_an_epoch_takes_every_row_once(num_rows):
    rows = draws.permute_rows(np.arange(num_rows), num_rows, seed=3, epoch=2)
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_rows_beyond_32_bits_stay_in_range():
    rows = draws.permute_rows(np.arange(1000), (1 << 40) + 7, seed=0, epoch=0)
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0
    assert 1 << 39 < rows.max() < (1 << 40) + 7


def test_every_order_of_four_rows_is_equally_likely():
    """Fails if rounds or keys are dropped: then some of the 24 orders never come."""
    places = np.arange(4)
    counts = collections.Counter(
        tuple(draws.permute_rows(places, 4, seed, epoch=0).tolist())
        for seed in range(2400)
    )
    assert len(counts) == 24
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi_square < 52  # 23 degrees of freedom: one in 2000 by chance


def test_epochs_and_seeds_have_their_own_orders():
    orders = {
        tuple(draws.permute_rows(np.arange(50), 50, seed, epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
