"""Metrics of samples against loops over single tokens, and their sorted index."""

import math
import struct
import zlib

import crc32c
import numpy as np
import pytest

from tests.support.refusals import data_error
from zjax.data import metric_index, metrics
from zjax.errors import DataError

VOCAB = 300


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    tokens = generator.zipf(1.3, (20, 33)) % VOCAB
    is_token = np.arange(33) < generator.integers(1, 34, 20)[:, None]
    return metrics.Batch(np.arange(100, 120), tokens, is_token)


@pytest.fixture
def counts(batch):
    return np.bincount(batch.tokens[batch.is_token], minlength=VOCAB)


def samples(batch):
    return [
        row[kept].tolist()
        for row, kept in zip(batch.tokens, batch.is_token, strict=True)
    ]


def rarity(tokens, counts):
    total = sum(max(count, 1) for count in counts.tolist())
    return math.floor(-sum(math.log(max(counts[t], 1) / total) for t in tokens))


def make(name, counts=None):
    return metrics.make_metric(name, length=33, vocab_size=VOCAB, counts=counts)


def test_length_counts_tokens_without_padding(batch):
    assert make("seqreo")(batch).tolist() == [len(sample) for sample in samples(batch)]


def test_rarity_is_that_of_loops(batch, counts):
    """Fails if padding counts, a token that never occurs has p = 0, or p is of logs."""
    found = make("voc", counts)(batch)
    assert found.tolist() == [rarity(sample, counts) for sample in samples(batch)]
    assert len(set(found.tolist())) > 10
    once = metrics.surprisals(np.array([6, 0, 1]))  # as one that never occurs
    np.testing.assert_array_equal(once, np.log([8 / 6, 8, 8]))


def test_length_comes_before_rarity(batch, counts):
    """Fails if the scale of the length is no power of 10 above every rarity."""
    total = np.maximum(counts, 1).sum()
    largest = 33 * math.log(total)  # of 33 tokens that occur once
    scale = 10 ** (math.ceil(math.log10(largest)) + 1)
    found = make("seqreo_voc", counts)(batch)
    assert found.tolist() == [
        len(sample) * scale + rarity(sample, counts) for sample in samples(batch)
    ]
    keys = [(len(sample), rarity(sample, counts)) for sample in samples(batch)]
    order = sorted(range(20), key=lambda number: keys[number])
    assert np.argsort(found, kind="stable").tolist() == order


def test_a_corpus_of_one_token_has_no_rarity():
    counts = np.array([5])
    tokens = np.zeros((1, 4), np.int64)
    batch = metrics.Batch(np.array([0]), tokens, tokens == 0)
    make = metrics.make_metric("seqreo_voc", length=4, vocab_size=1, counts=counts)
    assert make(batch).tolist() == [40.0]


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 1), (257, 2), (65_537, 4)])
def test_compression_is_of_the_least_bytes_that_hold_the_vocabulary(
    batch, vocab_size, width
):
    tokens = batch.tokens % 256
    found = metrics.compression_ratios(tokens, batch.is_token, vocab_size)
    expected = []
    for row, kept in zip(tokens.tolist(), batch.is_token, strict=True):
        tokens = [token for token, is_kept in zip(row, kept, strict=True) if is_kept]
        content = b"".join(token.to_bytes(width, "little") for token in tokens)
        expected.append(len(zlib.compress(content)) / len(content))
    assert found.tolist() == expected
    padding = np.zeros((1, 4), np.int64)
    assert metrics.compression_ratios(padding, padding > 0, 9).tolist() == [0.0]


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """A module `scores_of_tests` of the caller."""
    (tmp_path / "scores_of_tests.py").write_text(
        "import math\n"
        "number = 3\n"
        "def first(tokens): return tokens[0] / 2\n"
        "def nan(tokens): return math.nan if len(tokens) == 20 else 1\n"
        "def inf(tokens): return math.inf\n"
        "def negative(tokens): return -1\n"
        "def text(tokens): return 'hard'\n"
        "def fault(tokens): return 1 / 0\n"
    )
    (tmp_path / "broken_of_tests.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_sees_tokens_without_padding(batch, scores):
    found = make("scores_of_tests:first")(batch)
    assert found.tolist() == [sample[0] / 2 for sample in samples(batch)]


FINITE = "return a finite number of 0 or more"


@pytest.mark.parametrize(
    ("name", "problem"),
    {
        "scores_of_tests:nan": f"gives nan for sample 110; {FINITE}",
        "scores_of_tests:inf": f"gives inf for sample 100; {FINITE}",
        "scores_of_tests:negative": f"gives -1.0 for sample 100; {FINITE}",
        "scores_of_tests:text": (
            "fails on sample 100 (ValueError: could not convert string to float: "
            f"'hard'); {FINITE}"
        ),
        "scores_of_tests:fault": (
            f"fails on sample 100 (ZeroDivisionError: division by zero); {FINITE}"
        ),
        "vocab": (
            "is not a metric; use seqreo, voc, seqreo_voc, compression or "
            "module:function"
        ),
        "scores_of_tests:frist": "names no function; define frist in scores_of_tests",
        "scores_of_tests:number": "names no function; define number in scores_of_tests",
        "broken_of_tests:score": (
            "cannot be imported (ModuleNotFoundError: No module named "
            "'nowhere_at_all'); run where Python finds the module, or mend it"
        ),
    }.items(),
)
def test_what_is_no_metric_is_refused(batch, scores, name, problem):
    tokens = np.tile(np.arange(33), (20, 1))
    is_token = np.arange(33) < np.arange(10, 30)[:, None]
    with data_error(f"metrics='{name}' {problem}"):
        make(name)(metrics.Batch(batch.numbers, tokens, is_token))


def test_lengths_beyond_the_integers_of_float64_are_refused():
    with data_error(
        "metrics='seqreo_voc' reaches 100,000,000,000,000,000 with samples of "
        "100000000 tokens; use shorter samples: numbers above 9,007,199,254,740,992 "
        "are not exact"
    ):
        metrics.make_metric(
            "seqreo_voc", length=10**8, vocab_size=2, counts=np.array([1, 1])
        )


VALUES = np.array([3.0, 1.0, 2.5, 1.0, 0.0, 3.0, 1.0])


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = metric_index.index_path("", "voc")
    metric_index.write_index(path, "voc", VALUES, "abcd")
    return path


def test_samples_are_sorted_and_equal_ones_stay_in_order(path):
    index = metric_index.open_index(path, "abcd")
    assert index.metric == "voc"
    assert index.values.tolist() == sorted(VALUES.tolist())
    assert index.samples.tolist() == [4, 1, 3, 6, 2, 0, 5]
    assert isinstance(index.samples.base, np.memmap)
    assert [entry.name for entry in path.parent.iterdir()] == ["voc.index"]


@pytest.mark.parametrize("difficulty", [-1, 0, 0.5, 1, 2.5, 3, 9])
def test_a_difficulty_admits_what_is_not_above_it(path, difficulty):
    index = metric_index.open_index(path, "abcd")
    admitted = index.admitted(difficulty).tolist()
    assert sorted(admitted) == np.flatnonzero(difficulty >= VALUES).tolist()
    assert index.num_admitted(difficulty) == len(admitted)


@pytest.mark.parametrize(
    ("percentile", "last", "expected"), [(0, 3, 0), (1, 3, 2), (2, 3, 4), (3, 3, 7)]
)
def test_percentiles_are_of_equal_size_and_the_last_takes_all(
    path, percentile, last, expected
):
    index = metric_index.open_index(path, "abcd")
    assert index.num_admitted_percentile(percentile, last) == expected
    admitted = index.admitted_percentile(percentile, last)
    assert admitted.tolist() == [4, 1, 3, 6, 2, 0, 5][:expected]


def sum_header(content):
    """The header with a checksum that fits."""
    header = content[: metric_index.HEADER_BYTES - 4]
    end = struct.pack("<I", crc32c.crc32c(header))
    return header + end + content[metric_index.HEADER_BYTES :]


def changed(content, position, new):
    return content[:position] + new + content[position + len(new) :]


SIZE = metric_index.HEADER_BYTES + 16 * len(VALUES)
DAMAGE = {
    "empty": (lambda x: b"", "is not a file of checksummed columns"),
    "another-file": (lambda x: b"PK" + x[2:], "is not a file of checksummed columns"),
    "header-cut": (lambda x: x[:99], "is truncated: 99 bytes, less than its header"),
    "one-byte-short": (
        lambda x: x[:-1],
        f"is truncated: {SIZE - 1} bytes, but its header says {SIZE}",
    ),
    "one-byte-long": (
        lambda x: x + b"\0",
        f"is too long: {SIZE + 1} bytes, but its header says {SIZE}",
    ),
    "header-damaged": (
        lambda x: changed(x, 30, b"z"),
        "is damaged: its header does not match its checksum",
    ),
    "a-value-damaged": (
        lambda x: changed(x, SIZE - 3, b"z"),
        "is damaged: it does not match its checksum",
    ),
    "another-format": (
        lambda x: changed(x, 8, b"\7"),
        "is of format 7, but this zjax reads format 1",
    ),
    "a-shard": (
        lambda x: sum_header(changed(x, 12, b"\1")),
        "holds 1 columns of 7 numbers",
    ),
    "any-size": (
        lambda x: sum_header(changed(x, 16, b"\xff" * 8)),
        f"holds 2 columns of {2**64 - 1} numbers",
    ),
    "no-rows": (
        lambda x: sum_header(changed(x, 16, bytes(8))),
        "holds 2 columns of 0 numbers",
    ),
}
REMEDY = "run `zjax data analyze` on this dataset"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused(path, name):
    damage, problem = DAMAGE[name]
    path.write_bytes(damage(path.read_bytes()))
    with data_error(f"index='voc.index' {problem}; {REMEDY}"):
        metric_index.open_index(path, "abcd")


def test_every_flipped_byte_is_found(path):
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        path.write_bytes(changed(good, position, bytes([good[position] ^ 0x40])))
        with pytest.raises(DataError, match=r"^index='voc\.index' "):
            metric_index.open_index(path, "abcd")


def test_the_index_of_another_dataset_is_refused(path):
    with data_error(
        f"index='voc.index' belongs to dataset abcd, but this one is efgh; {REMEDY}"
    ):
        metric_index.open_index(path, "efgh")


@pytest.mark.parametrize(
    ("name", "problem"), [("nowhere", "does not exist"), (".", "is a directory")]
)
def test_what_is_no_file_is_refused(path, name, problem):
    with data_error(f"index='{name}' {problem}; {REMEDY}"):
        metric_index.open_index(name, "abcd")


def test_blocks_of_long_columns_are_joined(path, monkeypatch):
    """Fails if a block of a column that is larger than one block is lost."""
    monkeypatch.setattr(metric_index, "_BLOCK_NUMBERS", 3)
    metric_index.write_index(path, "voc", VALUES, "abcd")
    monkeypatch.setattr(metric_index, "_BLOCK_NUMBERS", 5)
    index = metric_index.open_index(path, "abcd")
    assert index.values.tolist() == sorted(VALUES.tolist())
