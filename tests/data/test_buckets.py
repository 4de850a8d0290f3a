"""Buckets against loops over documents: each token once, one length, one document."""

import collections

import numpy as np
import pytest

from tests.support.refusals import data_error
from zjax.data import buckets
from zjax.schedule.pacing import Pacing
from zjax.settings import schema

SIZES = np.random.default_rng(0).integers(1, 60, 150)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
TOKENS = np.arange(OFFSETS[-1])
"""Each token is its own position."""
SHORTEST, LONGEST, ROWS = 4, 16, 2
LENGTHS, BATCH_ROWS = (4, 8, 16), (8, 4, 2)


def make_config(kind=schema.Cut, **settings):
    settings = {"shortest": SHORTEST} | settings
    return schema.Config(
        seed=7,
        global_batch_size=ROWS,
        num_steps=400,
        data=schema.Data(length=LONGEST),
        buckets=kind(**settings),
    )


def open_buckets(kind=schema.Cut, offsets=OFFSETS, **settings):
    config = make_config(kind, **settings)
    return buckets.Buckets(TOKENS[: offsets[-1]], offsets, config.buckets, config)


def read(opened, step):
    rows, indices = opened.draw(step)
    return rows.read(indices)


def cut_by_hand(start, end):
    """Pieces of a document, the longest first, and the tokens of its tail."""
    pieces = []
    for length in reversed(LENGTHS):
        while end - start >= length:
            pieces.append((start, length))
            start += length
    return pieces, list(range(start, end))


def all_pieces():
    cuts = [
        cut_by_hand(start, end)
        for start, end in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)
    ]
    pieces = [piece for found, _ in cuts for piece in found]
    return pieces, [token for _, tail in cuts for token in tail]


def steps_per_epoch():
    counts = collections.Counter(length for _, length in all_pieces()[0])
    pairs = zip(LENGTHS, BATCH_ROWS, strict=True)
    return sum(counts[length] // rows for length, rows in pairs)


@pytest.mark.parametrize("order", [schema.Shuffle, schema.Grow])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_uses_each_token_once(order, epoch):
    """Besides tails and the pieces that fill no batch, whose number is told."""
    opened, steps = open_buckets(order=order()), steps_per_epoch()
    drawn = [read(opened, epoch * steps + step)["tokens"] for step in range(steps)]
    found = [(row[0], len(row)) for batch in drawn for row in batch.tolist()]
    pieces, tails = all_pieces()
    unused = collections.Counter(pieces) - collections.Counter(found)
    assert collections.Counter(found) - collections.Counter(pieces) == {}
    spare = sum(
        sum(size == length for _, size in pieces) % rows
        for length, rows in zip(LENGTHS, BATCH_ROWS, strict=True)
    )
    assert unused.total() == spare
    told = opened.describe()
    assert f"{len(tails):,} tokens ({len(tails) / len(TOKENS):.1%}) are tails" in told
    assert f"{spare} rows fill no batch of an epoch" in told


@pytest.mark.parametrize("order", [schema.Shuffle, schema.Grow, schema.Mixture])
def test_rows_of_a_bucket_are_shuffled_anew_in_each_epoch(order):
    opened, num = open_buckets(order=order()), sum(n == 8 for _, n in all_pieces()[0])
    batches = (read(opened, step)["tokens"] for step in range(900))
    firsts = np.concatenate([x[:, 0] for x in batches if x.shape[1] == 8])
    per_epoch = num if order == "mixture" else num // 4 * 4
    epochs = firsts[:per_epoch], firsts[per_epoch : 2 * per_epoch]
    for epoch in epochs:
        assert epoch.tolist() != sorted(epoch.tolist())
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("kind", [schema.Cut, schema.Pad])
@pytest.mark.parametrize(
    "order", [schema.Shuffle, schema.Grow, schema.Mixture, schema.Paced]
)
def test_a_batch_has_one_length_and_rows_of_one_document(kind, order):
    opened, again = (open_buckets(kind, order=order()) for _ in range(2))
    for step in (0, 1, 5, 60, 300, 2):
        batch = read(opened, step)
        assert batch["tokens"].size == ROWS * LONGEST
        for name, x in read(again, step).items():
            np.testing.assert_array_equal(x, batch[name])
        length = batch["tokens"].shape[1]
        assert length == opened.shape_at(step + 1)[1]
        columns = (batch[name] for name in ("tokens", "targets", "weights"))
        for tokens, targets, weights in zip(*columns, strict=True):
            size = int((tokens[1:] > 0).sum()) + 1
            document = np.searchsorted(OFFSETS, tokens[0], "right")
            assert tokens[size - 1] < OFFSETS[document]
            assert tokens[:size].tolist() == [tokens[0] + i for i in range(size)]
            ends = tokens[size - 1] == OFFSETS[document] - 1
            predicted = size - int(ends)
            assert weights.tolist() == [1] * predicted + [0] * (length - predicted)
            assert targets[:predicted].tolist() == (tokens[:predicted] + 1).tolist()
            is_cut = kind is schema.Cut
            assert size == length if is_cut else 2 * size > length or length == 4


def test_padded_documents_are_whole():
    opened, found = open_buckets(schema.Pad), set()
    for step in range(150):  # more than an epoch
        batch = read(opened, step)["tokens"]
        found |= {(row[0], sum(x > 0 for x in row[1:]) + 1) for row in batch.tolist()}
    cut = {
        (place, min(LONGEST, end - place))
        for start, end in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)
        for place in range(start, end, LONGEST)
    }
    assert found <= cut and len(found) > 0.9 * len(cut)


def test_short_rows_come_first_in_a_cycle():
    """Fails if the odds are ignored, or turned around."""
    opened, steps = open_buckets(order=schema.Grow(num_cycles=2)), steps_per_epoch()
    lengths = [opened.shape_at(step + 1)[1] for step in range(steps)]
    for cycle in np.array_split(lengths, 2):
        thirds = np.array_split(cycle, 3)
        assert thirds[0].mean() < 0.8 * thirds[2].mean()


def test_a_mixture_follows_its_weights():
    opened = open_buckets(order=schema.Mixture(weights=(1.0, 1.0, 2.0)))
    lengths = [opened.shape_at(step + 1)[1] for step in range(2_000)]
    shares = [lengths.count(length) / 2_000 for length in LENGTHS]
    np.testing.assert_allclose(shares, [0.25, 0.25, 0.5], atol=0.04)


def test_pieces_of_a_mixture_come_once_per_epoch_of_their_bucket():
    opened, pieces = open_buckets(order=schema.Mixture()), all_pieces()[0]
    num = sum(length == 8 for _, length in pieces)
    found = []
    for step in range(3 * num):
        if opened.shape_at(step + 1)[1] == 8:
            found += read(opened, step)["tokens"][:, 0].tolist()
    assert len(set(found[:num])) == num


def test_no_bucket_is_longer_than_its_pacing():
    settings = schema.LinearPacing(num_steps=40, start=4, multiple=4)
    opened = open_buckets(order=schema.Paced(pacing=settings))
    lengths = [opened.shape_at(step)[1] for step in range(1, 120)]
    bounds = Pacing((0, 14, 40), (4, 8, 16))
    assert all(n <= bounds.at(step) for step, n in enumerate(lengths, start=1))
    assert {*lengths[:13]} == {4} and {*lengths[13:39]} == {4, 8}
    assert {*lengths[39:]} == {4, 8, 16}


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (
            np.arange(0, 15 * 12, 15),
            "data.length=16 leaves no document to the bucket of 16 tokens; use other "
            "lengths, a smaller batch, or more documents",
        ),
        (
            np.array([0, 16, 32, 64, 76, 88, 100, 112]),
            "buckets.shortest=4 leaves 4 rows to the bucket of 4 tokens, fewer than "
            "the 8 of a batch; use other lengths, a smaller batch, or more documents",
        ),
    ],
    ids=["none", "few"],
)
def test_a_bucket_without_a_batch_is_refused(offsets, message):
    with data_error(message):
        open_buckets(offsets=offsets)
