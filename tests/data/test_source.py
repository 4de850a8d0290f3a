"""Data is opened by its settings, known again by its content, never read damaged."""

import dataclasses
import json

import crc32c
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import squares
from tests.support.refusals import data_error
from zjax.data import batches, packing, prepare, source, store, sums
from zjax.data import sums as digest
from zjax.data.tokenizer import make_bytes, train_bpe
from zjax.errors import DataError
from zjax.settings import schema


@pytest.fixture(autouse=True)
def token_directory(tmp_path, monkeypatch):
    """A directory `tokens` with 8 documents of 21 bytes and their end."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{number:021}"}) for number in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare.prepare(["a.jsonl"], "tokens", validation_fraction=0.0)
    return tmp_path / "tokens"


def make_config(*, vocab_size=300, **data):
    return schema.Config(
        data=schema.Data(**{"length": 16} | data),
        model=schema.Model(vocab_size=vocab_size),
    )


def make_tree(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")


def decode_documents(opened):
    spans = zip(opened.offsets[:-1], opened.offsets[1:], strict=True)
    return [bytes(opened.tokens[a : b - 1].tolist()).decode() for a, b in spans]


def test_standard_library_is_split_by_file(tmp_path):
    """Fails if a file is on both sides, or on none, or the wrong files are taken."""
    wanted = [f"package{n}/module{n}.py" for n in range(200)]
    skipped = ["site-packages/x.py", "a/test/x.py", "a/__pycache__/x.py", "a/b.txt"]
    root = tmp_path / "lib"
    make_tree(root, wanted + skipped)
    (root / "empty.py").write_text("")
    found = {
        split: decode_documents(source.open_standard_library(split, str(root)))
        for split in ("train", "validation")
    }
    every = found["train"] + found["validation"]
    assert sorted(every) == sorted(f"# {name}\n" for name in wanted)
    assert 3 <= len(found["validation"]) <= 20


def test_standard_library_stops_at_its_limit(tmp_path, monkeypatch):
    make_tree(tmp_path / "lib", [f"module{n:03}.py" for n in range(200)])
    monkeypatch.setattr(source, "LIMIT_BYTES", 50 * len("# module000.py\n"))
    sizes = [
        len(source.open_standard_library(split, str(tmp_path / "lib")).offsets)
        for split in ("train", "validation")
    ]
    assert sum(sizes) - 2 == 50


def test_this_standard_library_reads_as_python():
    opened = source.open_standard_library("validation")
    text = "".join(decode_documents(opened))
    assert text.count("\n") > 1000
    assert text.count("def ") > 100
    assert opened.tokens[opened.offsets[1:] - 1].tolist() == [256] * (
        len(opened.offsets) - 1
    )


def test_installation_without_source(tmp_path):
    with data_error(
        "data.source='standard_library' has no train files: no Python source lies "
        f"under {tmp_path / 'lib'}; use data.source='tokens' and `zjax data prepare`"
    ):
        source.open_standard_library("train", str(tmp_path / "lib"))


@pytest.mark.parametrize("kind", ["blocks", "documents"])
def test_synthetic_rows_depend_on_seed_split_and_row_alone(kind):
    config = make_config(source="synthetic", packing=kind)
    once = source.open_rows(config, "train").read(np.array([5, 1 << 39, 6]))
    again = source.open_rows(config, "train").read(np.array([6]))
    assert once["tokens"][2].tolist() == again["tokens"][0].tolist()
    other_seed = dataclasses.replace(config, seed=1)
    rows = [
        *once["tokens"].tolist(),
        source.open_rows(config, "validation")
        .read(np.array([5]))["tokens"][0]
        .tolist(),
        source.open_rows(other_seed, "train").read(np.array([5]))["tokens"][0].tolist(),
    ]
    assert len({tuple(row) for row in rows}) == 5


def test_synthetic_tokens_can_be_learnt_and_documents_do_not_predict_each_other():
    """Fails if the tokens are noise: then the stride would come once in 300 times."""
    config = make_config(source="synthetic", length=500)
    batch = source.open_rows(config, "train").read(np.arange(20))
    steps = (batch["targets"] - batch["tokens"]) % 300
    assert 0.85 < np.mean(steps == 101) < 0.9
    assert 0 <= batch["tokens"].min() < batch["tokens"].max() < 300
    config = make_config(source="synthetic", packing="documents")
    batch = source.open_rows(config, "train").read(np.arange(5))
    assert batch["segment_ids"].max(axis=1).tolist() == [4] * 5
    assert batch["weights"].sum(axis=1).tolist() == [16 - 4] * 5


TOKENS = {"source": "tokens", "path": "tokens"}


@pytest.mark.parametrize(
    ("data", "kind", "tokenizer"),
    [
        ({"source": "standard_library"}, packing.BlockRows, "bytes"),
        (TOKENS, packing.BlockRows, "bytes"),
        (TOKENS | {"packing": "documents"}, packing.DocumentRows, "bytes"),
        ({"source": "synthetic"}, source.SyntheticRows, "numbers"),
    ],
)
def test_settings_choose_the_rows_and_the_tokenizer(data, kind, tokenizer):
    assert type(source.open_rows(make_config(**data), "train")) is kind
    assert source.make_tokenizer(make_config(**data)).name == tokenizer


def cut_off(directory):
    (directory / "train.bin").write_bytes(b"\0" * 10)


def put_folder(path):
    path.unlink()
    path.mkdir()


def write_large_id(directory):
    tokens = np.fromfile(directory / "train.bin", "<u2")
    tokens[7] = 999
    write_summed(directory / "train.bin", tokens)


def write_offsets(directory, values, at=0):
    offsets = np.fromfile(directory / "train.idx", "<i8")
    offsets[at : at + len(values)] = values
    write_summed(directory / "train.idx", offsets)


def write_summed(path, content):
    """Writes a file whose checksums match, as an attacker would."""
    file = sums.SummedFile(path)
    file.write(content.tobytes())
    file.close()


FAULTS = {
    "no-directory": (
        lambda directory: None,
        {"path": "elsewhere"},
        "data.path='elsewhere' holds no meta.json; give a directory made by `zjax data "
        "prepare`",
    ),
    "broken-meta": (
        lambda directory: (directory / "meta.json").write_text("{"),
        {},
        "data.path='tokens' has a broken meta.json; give a directory made by `zjax "
        "data prepare`",
    ),
    "folder-as-meta": (
        lambda directory: put_folder(directory / "meta.json"),
        {},
        "data.path='tokens' has a meta.json that cannot be read (it is not a regular "
        "file); give a directory made by `zjax data prepare`",
    ),
    "another-format": (
        lambda directory: (directory / "meta.json").write_text('{"format": 3}'),
        {},
        "data.path='tokens' has a meta.json that is not of format 2; give a directory "
        "made by `zjax data prepare`",
    ),
    "cut-off": (
        cut_off,
        {},
        "data.path='tokens/train.bin' holds 10 bytes, but meta.json says 352; prepare "
        "it again",
    ),
    "no-index": (
        lambda directory: (directory / "train.idx").unlink(),
        {},
        "data.path='tokens/train.idx' is missing, but meta.json says 72; prepare it "
        "again",
    ),
    "index-that-does-not-begin-at-0": (
        lambda directory: write_offsets(directory, [1]),
        {},
        "data.path='tokens/train.idx' does not cut 176 tokens into documents; prepare "
        "it again",
    ),
    "index-beyond-the-tokens": (
        lambda directory: write_offsets(directory, [2**40], at=4),
        {"packing": "documents"},
        "data.path='tokens/train.idx' does not cut 176 tokens into documents; prepare "
        "it again",
    ),
    "id-beyond-its-own-vocabulary": (
        write_large_id,
        {},
        "data.path='tokens/train.bin' holds token id 999, beyond its vocabulary of "
        "257; prepare it again",
    ),
    "vocabulary-beyond-the-model": (
        lambda directory: None,
        {"vocab_size": 200},
        "data.path='tokens/train.bin' has a vocabulary of 257 (largest id found: 256), "
        "beyond model.vocab_size=200; set model.vocab_size=257 or more",
    ),
    "bytes-beyond-the-model": (
        lambda directory: None,
        {"source": "standard_library", "vocab_size": 256},
        "data.source='standard_library' has a vocabulary of 257 (largest id found: "
        "256), beyond model.vocab_size=256; set model.vocab_size=257 or more",
    ),
    "too-short": (
        lambda directory: None,
        {"length": 176},
        "data.length=176 needs 177 tokens, but the train split of tokens/train.bin has "
        "176; use 175 or less, or more text",
    ),
}


@pytest.mark.parametrize(("damage", "settings", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_is_named(damage, settings, message, token_directory):
    damage(token_directory)
    settings = {"source": "tokens", "path": "tokens"} | settings
    with data_error(message):
        source.open_rows(make_config(**settings), "train")


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "byte", "problem"),
    [
        ("train.bin", 40, "train.bin' is damaged between bytes 32 and 47"),
        ("train.bin", 351, "train.bin' is damaged between bytes 336 and 351"),
        ("train.idx", 16, "train.idx' is damaged between bytes 16 and 31"),
        ("train.bin.sums", 350, "sums' is damaged: it does not match its checksum"),
        ("train.idx.sums", 8, "train.idx.sums' is of format 0"),
    ],
)
def test_a_flipped_bit_is_never_read(name, byte, problem, token_directory, monkeypatch):
    """Fails if a run trains on it, or if a chunk is verified at its first half only."""
    monkeypatch.setattr(sums, "CHUNK_BYTES", 16)
    monkeypatch.setattr(sums, "SCAN_TOKENS", 1)  # a stream too long to read at once
    monkeypatch.setattr(sums, "NUM_SAMPLED", 1)
    prepare.prepare(["a.jsonl"], "small", validation_fraction=0.0)
    flip(token_directory.with_name("small") / name, byte)
    with pytest.raises(DataError) as error:
        opened = store.open_store("small", "train")
        for start in range(0, 176, 4):
            opened.tokens[start : start + 5]
    assert problem in str(error.value)
    assert str(error.value).endswith("; copy it again, or prepare it again")


def test_sums_are_of_the_whole_file(token_directory):
    """Fails if a file of checksums of fewer chunks passes, or a missing one does."""
    sums.sums_path(token_directory / "train.bin").unlink()
    with data_error(
        "data.path='tokens/train.bin.sums' does not exist; copy it again, or prepare "
        "it again"
    ):
        store.open_store("tokens", "train")
    sums.write_columns(
        sums.sums_path(token_directory / "train.bin"),
        [np.zeros(2, np.int64)],
        digest="",
        name="train.bin",
    )
    with data_error(
        "data.path='tokens/train.bin.sums' holds 2 checksums, but train.bin has 1 "
        "chunks; copy it again, or prepare it again"
    ):
        store.open_store("tokens", "train")


def test_meta_with_a_flipped_digit_and_a_split_that_was_not_made(token_directory):
    """Fails if other ids end the texts of a run than those that were prepared."""
    config = make_config(source="tokens", path="tokens")
    with data_error(
        "data.path='tokens' has no validation split; prepare it again with a larger "
        "validation_fraction"
    ):
        source.open_rows(config, "validation")
    path = token_directory / "meta.json"
    path.write_text(
        path.read_text().replace('"end_ids": [\n      256', '"end_ids": [\n      254')
    )
    with data_error(
        "data.path='tokens' has a meta.json that does not match its checksum; copy it "
        "again, or prepare it again"
    ):
        store.read_meta("tokens")


META_FAULTS = {
    "no-splits": lambda meta: meta.pop("splits"),
    "no-vocabulary": lambda meta: meta["tokenizer"].pop("vocab_size"),
    "extra-key": lambda meta: meta.update(extra=1),
    "vocabulary-of-2**62": lambda meta: meta["tokenizer"].update(vocab_size=2**62),
    "tokens-of-2**62": lambda meta: meta["splits"]["train"].update(num_tokens=2**62),
    "unknown-dtype": lambda meta: meta.update(dtype="uint8"),
    "unknown-tokenizer": lambda meta: meta.update(tokenizer="words"),
    "vocabulary-as-text": lambda meta: meta["tokenizer"].update(vocab_size="257"),
    "end-beyond-the-vocabulary": lambda meta: meta["tokenizer"].update(end_ids=[257]),
    "list-of-splits": lambda meta: meta.update(splits=["train"]),
    "split-without-sizes": lambda meta: meta["splits"].update(train=None),
    "size-left-out": lambda meta: meta["splits"]["train"].pop("num_documents"),
    "size-of-zero": lambda meta: meta["splits"]["train"].update(num_tokens=0),
}


@pytest.mark.parametrize("damage", META_FAULTS.values(), ids=META_FAULTS)
def test_meta_that_says_something_else_is_broken(damage, token_directory):
    meta = json.loads((token_directory / "meta.json").read_text())
    del meta["checksum"]
    damage(meta)
    meta["checksum"] = crc32c.crc32c(json.dumps(meta, sort_keys=True).encode())
    (token_directory / "meta.json").write_text(json.dumps(meta))
    with data_error(
        "data.path='tokens' has a broken meta.json; give a directory made by `zjax "
        "data prepare`"
    ):
        store.read_meta("tokens")


def test_long_streams_are_searched_in_parts(monkeypatch):
    """Fails if the parts leave out the end of the stream."""
    monkeypatch.setattr(sums, "SCAN_TOKENS", 640)
    tokens = np.zeros(100_000, np.uint16)
    tokens[-1] = 7
    assert store.largest_id(tokens) == 7


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, " " * 2**20 + "{}"])
def test_meta_that_is_nested_or_large_is_broken(text, token_directory):
    (token_directory / "meta.json").write_text(text)
    with pytest.raises(DataError, match="has a broken meta"):
        store.read_meta("tokens")


def test_a_directory_of_format_1_is_read(token_directory, caplog):
    """Fails if folders that an earlier zjax prepared are refused, or read unwarned."""
    path = token_directory / "meta.json"
    meta = json.loads(path.read_text())
    old = {name: meta[name] for name in ("dtype", "splits", "has_answers")}
    for file in token_directory.glob("*.sums"):
        file.unlink()
    old |= {"format": 1, "tokenizer": "bytes", "vocab_size": 257, "end_id": 256}
    path.write_text(json.dumps(old))
    assert store.read_meta("tokens").tokenizer == make_bytes().record
    assert len(store.open_store("tokens", "train").tokens[:]) == 176
    assert caplog.messages == [
        "data.path='tokens' was prepared by an earlier zjax: it has no record of the "
        "tokens that begin and end texts, no chat template and no checksums; prepare "
        "it again with `zjax data prepare` for a new run, and keep it for runs that "
        "have started with it"
    ]
    train_bpe(["ab"] * 9, 258).save(str(token_directory / "tokenizer.json"))
    old |= {"tokenizer": "tokenizer.json", "vocab_size": 300, "end_id": 0}
    path.write_text(json.dumps(old))
    with pytest.raises(DataError, match="has a broken meta"):
        store.read_meta("tokens")
    path.write_text(json.dumps(old | {"vocab_size": 258}))
    record = store.read_meta("tokens").tokenizer
    assert (record.bos_id, record.end_ids, record.vocab_size) == (None, (0,), 258)


STREAM = np.arange(1000, dtype=np.uint16)


def changed(array, place):
    other = array.copy()
    other[place] += 1
    return other


def test_another_token_length_dtype_or_document_is_seen():
    offsets = np.array([0, 500, 1000])
    assert digest.digest_tokens(STREAM) == digest.digest_tokens(STREAM.copy())
    found = {
        digest.digest_tokens(STREAM),
        *(digest.digest_tokens(changed(STREAM, place)) for place in (0, 499, -1)),
        digest.digest_tokens(STREAM[:-1]),
        digest.digest_tokens(STREAM.astype(np.uint32)),
        digest.digest_tokens(STREAM, offsets),
        digest.digest_tokens(STREAM, changed(offsets, 1)),
    }
    assert len(found) == 8


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
