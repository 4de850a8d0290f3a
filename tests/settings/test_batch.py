"""The batch triad: any two sizes give the third."""

import itertools

import pytest

from zjax.errors import ConfigError
from zjax.settings import batch, schema


def resolve(whole, count, size, num_shards=8):
    config = schema.Config(
        global_batch_size=whole, num_microbatches=count, microbatch_size=size
    )
    sizes = batch.resolve_batch(config, num_shards)
    return sizes.global_batch_size, sizes.num_microbatches, sizes.microbatch_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param((64, 0, 0), (64, 1, 8), id="batch-alone-is-one-microbatch"),
        pytest.param((0, 0, 4), (32, 1, 4), id="microbatch-alone-is-one"),
        pytest.param((64, 2, 0), (64, 2, 4), id="batch-and-number"),
        pytest.param((64, 0, 4), (64, 2, 4), id="batch-and-size"),
        pytest.param((0, 2, 4), (64, 2, 4), id="number-and-size"),
        pytest.param((64, 2, 4), (64, 2, 4), id="all-three"),
    ],
)
def test_two_give_the_third(given, expected):
    assert resolve(*given) == expected


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_sizes_always_multiply_to_the_batch(num_shards):
    accepted = 0
    for given in itertools.product(range(0, 25, 4), range(3), range(3)):
        try:
            whole, count, size = resolve(*given, num_shards)
        except ConfigError:
            continue
        accepted += 1
        assert whole == count * size * num_shards
        assert min(whole, count, size) > 0
        asked = zip(given, (whole, count, size), strict=True)
        assert all(want in (0, got) for want, got in asked)
    assert accepted
