import numpy as np
import pytest

from tests.reference import packing as reference
from zjax.data import packing


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
