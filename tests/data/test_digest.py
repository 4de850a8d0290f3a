"""Data is known again by what is in it."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import squares
from zjax.data import batches, packing, source
from zjax.data import sums as digest

STREAM = np.arange(1000, dtype=np.uint16)


def changed(array, place):
    other = array.copy()
    other[place] += 1
    return other


@pytest.mark.parametrize("place", [0, 499, -1])
def test_one_other_token_is_seen(place):
    assert digest.digest_tokens(STREAM) == digest.digest_tokens(STREAM.copy())
    assert digest.digest_tokens(STREAM) != digest.digest_tokens(changed(STREAM, place))


def test_length_dtype_and_documents_are_seen():
    offsets = np.array([0, 500, 1000])
    found = {
        digest.digest_tokens(STREAM),
        digest.digest_tokens(STREAM[:-1]),
        digest.digest_tokens(STREAM.astype(np.uint32)),
        digest.digest_tokens(STREAM, offsets),
        digest.digest_tokens(STREAM, changed(offsets, 1)),
    }
    assert len(found) == 5


@pytest.mark.parametrize("place", [0, -1])
def test_a_long_stream_is_read_in_parts_from_its_start_to_its_end(monkeypatch, place):
    monkeypatch.setattr(digest, "SCAN_TOKENS", 640)
    stream = np.zeros(10_000, np.uint16)
    assert sum(len(part) for part in digest.token_parts(stream)) == 640
    assert digest.digest_tokens(stream) != digest.digest_tokens(changed(stream, place))


def test_rows_of_every_kind_are_known_by_their_data():
    offsets = np.array([0, 500, 1000])
    assert packing.BlockRows(STREAM, 7).digest() == digest.digest_tokens(STREAM)
    assert packing.DocumentRows(STREAM, offsets, 7).digest() == digest.digest_tokens(
        STREAM, offsets
    )
    first, other = (source.SyntheticRows(seed, "train", 9, 8, 0) for seed in (0, 1))
    assert first.digest() != other.digest()


def test_another_value_or_number_of_rows_is_seen_in_columns():
    rows = squares.rows(20)
    other = squares.Columns({"x": [*rows.columns["x"][:-1], 0.5]})
    found = [batches.ColumnRows(each).digest() for each in (rows, squares.rows(20))]
    assert found[0] == found[1]
    assert batches.ColumnRows(other).digest() != found[0]
    assert batches.ColumnRows(squares.rows(21)).digest() != found[0]


class Noisy(squares.Columns):
    """Rows that are made anew each time they are read, as those with random crops."""

    def __getitem__(self, indices):
        noise = np.random.default_rng().normal(size=len(indices))
        return super().__getitem__(indices) | {"noise": noise.tolist()}


def test_columns_that_are_drawn_at_random_count_by_their_form_alone():
    first, again = (batches.ColumnRows(Noisy(squares.rows(20).columns)) for _ in "ab")
    assert first.digest() == again.digest()
    other = Noisy({"x": [1.0] * 20})
    assert batches.ColumnRows(other).digest() != first.digest()


def test_a_large_array_of_a_batch_is_read_in_pieces():
    large = np.zeros(digest.WHOLE_BYTES, np.float32)
    sums = [
        digest.BatchChain().add({"x": x})
        for x in (large, changed(large, 0), changed(large, -1), large[:-1])
    ]
    assert len(set(sums)) == 4


def test_arrays_on_devices_count_by_their_form():
    zeros, ones = jnp.zeros(4), jnp.ones(4)
    chain = [digest.BatchChain().add([x]) for x in (zeros, ones, jnp.zeros(5))]
    assert chain[0] == chain[1] != chain[2]
