"""Which rows a step draws, how documents share rows, and how rows are cut."""

import collections

import numpy as np
import pytest

from tests.reference import packing as reference
from tests.reference import sampling
from zjax.data import draws, packing
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema

FULL, ROWS, SIZE = 16, 9, 4
STREAM = np.arange(FULL * ROWS + 1, dtype=np.uint16)


def make_config(microbatch_size=1):
    pacing = schema.LinearPacing(start=4, multiple=2, num_steps=6)
    return schema.Config(
        global_batch_size=SIZE,
        microbatch_size=microbatch_size,
        data=schema.Data(length=FULL),
        sequence_warmup=schema.Reshape(pacing=pacing),
    )


def make_draws(config):
    rows = packing.BlockRows(STREAM, FULL)
    order = draws.Sampler(3, ROWS, SIZE)
    return draws.ReshapedRows(rows, order, FULL, TrainingSchedule(config))


def pieces_by_hand(numbers, length, unit):
    """Tokens with the last target: the first piece of each row, then the second."""
    pieces = []
    for place in range(-(-(FULL + 1) // (length + 1))):
        start = min(place * (length + 1), FULL - length)
        for number in numbers:
            row = STREAM[number * FULL : (number + 1) * FULL + 1].tolist()
            pieces.append(row[start : start + length + 1])
    kept = -(-len(numbers) * (FULL + 1) // (length + 1))
    return pieces[: kept - kept % unit]


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_reshaped_rows_are_the_pieces_of_rows_in_order(microbatch_size):
    config = make_config(microbatch_size)
    lengths, made = [4, 6, 8, 10, 12, 16, 16], make_draws(config)
    tokens = 0
    for step in range(len(lengths)):
        lengths[step] = {1: 6, 2: 8, 3: 10, 4: 12, 5: 14}.get(step + 1, FULL)
        rows, indices = made.draw(step)
        numbers = made.order.indices(step).tolist()
        expected = pieces_by_hand(numbers, lengths[step], SIZE // microbatch_size)
        batch = rows.read(indices)
        assert batch["tokens"].tolist() == [piece[:-1] for piece in expected]
        assert batch["targets"].tolist() == [piece[1:] for piece in expected]
        assert len(indices) in made.sizes
        tokens += batch["tokens"].size
        assert made.schedule.tokens.sum_until(step + 1) == tokens


def test_every_row_of_a_reshaped_batch_is_seen():
    made = make_draws(make_config())
    for step in range(7):
        rows, indices = made.draw(step)
        first_tokens = STREAM[made.order.indices(step) * FULL]
        assert np.isin(first_tokens, rows.read(indices)["tokens"]).all()


def test_at_full_length_rows_are_whole():
    rows, indices = make_draws(make_config()).draw(6)
    whole = packing.BlockRows(STREAM, FULL).read(draws.Sampler(3, ROWS, 4).indices(6))
    assert rows.read(indices)["tokens"].tolist() == whole["tokens"].tolist()


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_read_the_parts_of_one_batch(num_processes):
    for step in range(7):
        rows, indices = make_draws(make_config()).draw(step)
        parts = np.split(indices, num_processes)
        read = [rows.read(part)["tokens"] for part in parts]
        whole = rows.read(indices)["tokens"]
        np.testing.assert_array_equal(np.concatenate(read), whole)


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


def make_documents(sizes, seed=0):
    """Ids from 1, so that a padding 0 stands out; each document ends in 999."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(1, 900, size - 1).tolist(), 999] for size in sizes]


def make_rows(documents, length):
    stream = np.array([token for document in documents for token in document])
    offsets = np.cumsum([0] + [len(document) for document in documents])
    return packing.DocumentRows(stream.astype(np.uint16), offsets, length)


SIZES = {
    "all-short": [3, 2, 4, 1, 5, 2, 2],
    "one-longer-than-a-row": [3, 25, 2],
    "exactly-a-row": [8, 8, 16, 3],
    "one-token-over": [9, 17, 1],
    "single": [1],
    "random": np.random.default_rng(1).integers(1, 30, 200).tolist(),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_document_rows_equal_the_oracle(sizes):
    length = 8
    documents = make_documents(sizes)
    rows = make_rows(documents, length)
    pieces = reference.cut(documents, length)
    part = [len(piece) for piece in pieces if len(piece) < length]
    window = int(packing.WINDOW_ROWS * length // np.mean(part)) if part else 1
    expected = reference.first_fit([len(piece) for piece in pieces], length, window)
    assert len(rows) == len(expected)
    batch = rows.read(np.arange(len(rows)))
    for row, members in enumerate(expected):
        fields = reference.fields([pieces[piece] for piece in members], length)
        assert {name: batch[name][row].tolist() for name in batch} == fields


def test_an_epoch_holds_every_token_and_every_prediction_once():
    documents = make_documents(SIZES["random"])
    rows = make_rows(documents, 8)
    batch = rows.read(np.arange(len(rows)))
    used = batch["segment_ids"] > 0
    every_token = sorted(token for document in documents for token in document)
    assert sorted(batch["tokens"][used].tolist()) == every_token
    every_target = sorted(token for document in documents for token in document[1:])
    predicted = batch["weights"] == 1
    assert sorted(batch["targets"][predicted].tolist()) == every_target


@pytest.mark.parametrize("window_rows", [1, 3, 128])
def test_first_fit_by_windows_equals_the_oracle(window_rows, monkeypatch):
    """Fails if windows are mixed up, or their rows are numbered with gaps."""
    monkeypatch.setattr(packing, "WINDOW_ROWS", window_rows)
    sizes = np.random.default_rng(2).integers(1, 21, 300)
    part = sizes[sizes < 20]
    window = int(window_rows * 20 // part.mean())
    rows = packing.pack_first_fit(sizes, 20)
    found = [np.flatnonzero(rows == row).tolist() for row in range(rows.max() + 1)]
    assert found == reference.first_fit(sizes.tolist(), 20, window)


def test_windows_hold_a_bounded_number_of_short_documents(monkeypatch):
    """Fails if documents of a token each make a window, and its table, without end."""
    monkeypatch.setattr(packing, "MAX_WINDOW_DOCUMENTS", 16)
    rows = packing.pack_first_fit(np.ones(40, np.int64), 64)
    assert rows.tolist() == [0] * 16 + [1] * 16 + [2] * 8


def test_packing_wastes_little_of_ordinary_text():
    """Fails if documents stop sharing rows (57 % would be used)."""
    sizes = np.random.default_rng(3).lognormal(6, 1, 5000).astype(np.int64) + 1
    _, pieces, _ = packing.split_documents(np.cumsum([0, *sizes.tolist()]), 1024)
    rows = packing.pack_first_fit(pieces, 1024)
    assert pieces.sum() / ((rows.max() + 1) * 1024) > 0.97


def test_blocks_predict_every_token_but_the_first_once():
    stream = np.random.default_rng(4).integers(0, 60_000, 33).astype(np.uint16)
    rows = packing.BlockRows(stream, 8)
    assert len(rows) == 4
    batch = rows.read(np.arange(4))
    assert batch["tokens"].reshape(-1).tolist() == stream[:32].tolist()
    assert batch["targets"].reshape(-1).tolist() == stream[1:].tolist()
    assert batch["weights"].tolist() == np.ones((4, 8)).tolist()
    assert [batch[name].dtype.name for name in batch] == ["int32", "int32", "float32"]


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(0, 0), (8, 0), (9, 1), (16, 1)])
def test_blocks_count_only_rows_with_all_their_targets(num_tokens, num_rows):
    assert len(packing.BlockRows(np.zeros(num_tokens, np.uint16), 8)) == num_rows
