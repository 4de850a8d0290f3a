import ast
import bz2
import dataclasses
import gzip
import json
import lzma
import resource

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import processors

from tests.support.refusals import data_error, listed
from zjax.data import documents, prepare, store, tables
from zjax.data.tokenizer import train_bpe
from zjax.errors import DataError

TEXTS = ["one fish", "zwei Fische ☕", "trois\npoissons", "fyra fiskar", "vijf vissen"]


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(directory):
    directory.mkdir()
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text)
    return "in"


def write_json_lines(directory):
    directory.mkdir()
    lines = [json.dumps({"text": text, "n": 1}) for text in TEXTS]
    (directory / "a.jsonl").write_text("\n\n".join(lines))
    return "in/a.jsonl"


def write_parquet(directory):
    directory.mkdir()
    table = pyarrow.table({"id": range(5), "text": TEXTS})
    parquet.write_table(table, directory / "a.parquet")
    return "in/a.parquet"


def read_split(path, split):
    opened = store.open_store(path, split)
    spans = zip(opened.offsets[:-1], opened.offsets[1:], strict=True)
    return [opened.tokens[start:end].tolist() for start, end in spans]


@pytest.mark.parametrize(
    "write", [write_texts, write_json_lines, write_parquet], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_every_document_comes_back(write, tokenizer, tmp_path):
    given = write(tmp_path / "in")
    meta = prepare.prepare([given], "out", tokenizer=tokenizer, validation_fraction=0.2)
    vocabulary = store.open_tokenizer("out")
    splits = {split: read_split("out", split) for split in meta.splits}
    found = {
        split: [vocabulary.decode(ids[:-1]) for ids in stored]
        for split, stored in splits.items()
    }
    held_out = [TEXTS[1]]
    assert found["validation"] == held_out
    assert found["train"] == [text for text in TEXTS if text not in held_out]
    ends = {ids[-1] for stored in splits.values() for ids in stored}
    assert ends == {meta.tokenizer.end_ids[0]}


def test_a_given_tokenizer_is_kept_beside_the_tokens(tmp_path):
    given = write_texts(tmp_path / "in")
    prepare.prepare([given], "first", tokenizer="bpe:280")
    again = prepare.prepare([given], "again", tokenizer="first/tokenizer.json")
    assert again == store.read_meta("again")
    first = store.read_meta("first")
    renamed = dataclasses.replace(again.tokenizer, name="bpe:280")
    assert dataclasses.replace(again, tokenizer=renamed) == first
    assert read_split("again", "train") == read_split("first", "train")


def test_large_vocabularies_take_32_bits(tmp_path):
    given = write_texts(tmp_path / "in")
    prepare.prepare([given], "first", tokenizer="bpe:280")
    content = json.loads((tmp_path / "first/tokenizer.json").read_text())
    content["added_tokens"][0]["id"] = 100_000
    content["model"]["vocab"]["<|endoftext|>"] = 100_000
    (tmp_path / "large.json").write_text(json.dumps(content))
    meta = prepare.prepare([given], "out", tokenizer="large.json")
    assert (meta.dtype, meta.vocab_size) == ("uint32", 100_001)
    assert meta.tokenizer.end_ids == (100_000,)
    assert read_split("out", "train")[0][-1] == 100_000


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    text = "".join(f"line {number} ☕\n" for number in range(40)) + "☕" * 60
    path = tmp_path / "long.txt"
    path.write_text(text)
    found = list(documents.read_documents(path, "text"))
    assert "".join(document.text for document in found) == text
    assert sum(document.num_bytes for document in found) == len(text.encode())
    assert max(document.num_bytes for document in found) <= 50
    assert [document.text[-1] for document in found][:5] == ["\n"] * 5
    assert [n for n, block in enumerate(found) if block.begins] == [0]
    assert [n for n, block in enumerate(found, 1) if block.ends] == [len(found)]


def test_a_long_text_begins_and_ends_once(tmp_path, monkeypatch):
    """Fails if a long file gets an end token, or a BOS, where it is only cut."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    text = "".join(f"line {number}\n" for number in range(40))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    inputs = ["long.txt", "short.txt"]
    prepare.prepare(inputs, "whole", validation_fraction=0.0)
    assert read_split("whole", "train") == [[*text.encode(), 256], [*b"short", 256]]
    prepare.prepare(inputs, "parts", validation_fraction=0.3)
    splits = {x: read_split("parts", x) for x in ("train", "validation")}
    parts = [part for split in splits.values() for part in split]
    assert sum(part.count(256) for part in parts) == 2
    assert len(parts) > 4  # a text with a hole is several documents
    assert sum(map(len, parts)) == len(text) + len("short") + 2


def write_tokenizer(folder):
    """Writes a tokenizer that begins texts with BOS, in the files of a checkpoint."""
    library = train_bpe([""], 258)
    library.add_special_tokens(["<s>", "</s>", "<|user|>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"a": 1}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {x: library.token_to_id(x) for x in ("<s>", "</s>", "<|user|>")}


def test_texts_begin_and_end_as_the_tokenizer_says(tmp_path, caplog):
    """Fails if BOS is left out, or the files of the tokenizer are left behind."""
    ids = write_tokenizer(tmp_path / "in")
    lines = [{"text": "<|user|>a</s>"}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"tokenizer": "in/tokenizer.json", "validation_fraction": 0.0}
    meta = prepare.prepare(["a.jsonl"], "out", **options)
    documents_found = read_split("out", "train")
    assert [x[0] for x in documents_found] == [ids["<s>"]] * 2
    assert [x[-1] for x in documents_found] == [ids["</s>"]] * 2
    assert len(documents_found[0]) == len("<|user|>a</s>") + 2
    assert meta.tokenizer.end_ids == (ids["</s>"],)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    ends = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    assert generation == {"a": 1} | ends
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert caplog.messages == [
        "texts spell special tokens of the tokenizer, which are encoded as ordinary "
        "text: </s>, <|user|> in 1 of 2 texts; give conversations with --chat, or set "
        "--special_tokens to encode the names as these tokens"
    ]
    prepare.prepare(["a.jsonl"], "special", special_tokens=True, **options)
    a, b = (store.open_tokenizer("special").encode(x).tolist()[1] for x in "ab")
    assert read_split("special", "train") == [
        [ids["<s>"], ids["<|user|>"], a, ids["</s>"]],
        [ids["<s>"], b, ids["</s>"]],
    ]
    assert len(caplog.messages) == 1


def test_texts_that_spell_special_tokens_are_counted_once(
    tmp_path, caplog, monkeypatch
):
    """Fails if blocks of a text count as texts, or one name alone is counted."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 16)
    write_tokenizer(tmp_path / "in")
    (tmp_path / "a.txt").write_text("a line: <|user|>\n" * 4)
    (tmp_path / "b.txt").write_text("a line: </s>\n")
    options = {"tokenizer": "in/tokenizer.json", "validation_fraction": 0.0}
    prepare.prepare(["a.txt", "b.txt"], "out", **options)
    [message] = caplog.messages
    assert "text: <|user|>, </s> in 2 of 2 texts; " in message


@pytest.mark.parametrize("fraction", [0.01, 0.25])
def test_validation_has_its_share(tmp_path, fraction):
    lines = [json.dumps({"text": "x" * 99}) for _ in range(400)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    meta = prepare.prepare(["a.jsonl"], "out", validation_fraction=fraction)
    assert meta.splits["validation"].num_documents == round(400 * fraction)


def test_no_validation_when_none_is_asked_for(tmp_path):
    given = write_texts(tmp_path / "in")
    meta = prepare.prepare([given], "out", validation_fraction=0.0)
    assert meta.splits == {
        "train": store.Split(
            np.sum([len(text.encode()) + 1 for text in TEXTS]).item(), 5
        )
    }


LARGE_FAULTS = {
    ("a.txt", b"x" * 70_000 + b"caf\xe9 noir"): (
        "is not UTF-8 at byte 70003; convert it (iconv -t UTF-8) or leave it out"
    ),
    ("a.jsonl", b"[" * 100_000): (
        "has broken JSON in its array (it is nested too deep); write one JSON object "
        "per line, or an array of objects"
    ),
}
FAULTS = [
    *(
        (*ast.literal_eval(given), said)
        for given, said in listed("prepare.txt").items()
    ),
    *(
        ({name: content}, {"inputs": [name]}, f"input='{name}' {said}")
        for (name, content), said in LARGE_FAULTS.items()
    ),
]


@pytest.mark.parametrize(("files", "settings", "message"), FAULTS)
def test_fault_is_named_and_nothing_is_left(files, settings, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    settings = {"inputs": ["a.txt"], "output": "out"} | settings
    with data_error(message):
        prepare.prepare(**settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_parquet_without_the_column(tmp_path):
    given = write_parquet(tmp_path / "in")
    with data_error(
        "input='in/a.parquet' has no column 'body', only id, text; choose another "
        "text_field"
    ):
        prepare.prepare([given], "out", text_field="body")


def test_a_directory_without_text_or_an_output_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "empty.txt").write_text("")
    with data_error("input='in' holds no text; give some"):
        prepare.prepare(["in"], "out")
    (tmp_path / "a.txt").write_text("one")
    with data_error("output='' is not given; name a folder to make"):
        prepare.prepare(["a.txt"], "")


def test_empty_files_of_a_directory_are_skipped(tmp_path):
    given = write_texts(tmp_path / "in")
    for name in ("__init__.py", "empty.parquet"):
        (tmp_path / "in" / name).write_text("")
    meta = prepare.prepare([given], "out")
    assert sum(split.num_documents for split in meta.splits.values()) == len(TEXTS)


def test_output_that_stops_halfway_is_not_there(tmp_path, monkeypatch):
    """Fails if files are written in place: a full disk or a kill would leave half."""
    given = write_texts(tmp_path / "in")
    seen = []

    def full(*_):
        seen.append((tmp_path / "out").exists())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.SplitWriter, "append", full)
    with data_error(
        "output='out' cannot be written: No space left on device; "
        "name a folder that can be made, on a disk with room"
    ):
        prepare.prepare([given], "out")
    assert seen == [False]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.fixture
def small_files():
    """The system refuses files above 64 KiB, at the moment that they reach the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_more(tmp_path, request):
    """Fails if a folder that was made on the way stays behind."""
    lines = [json.dumps({"text": "x" * 999}) for _ in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    request.getfixturevalue("small_files")
    with data_error(
        "output='new/out' cannot be written: File too large; "
        "name a folder that can be made, on a disk with room"
    ):
        prepare.prepare(["a.jsonl"], "new/out", validation_fraction=0.4)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_input_that_cannot_be_read(tmp_path, monkeypatch):
    """Fails if a broken disk under the input is said to be a fault of the output."""
    given = write_texts(tmp_path / "in")

    def broken(*_):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(documents, "read_documents", broken)
    with data_error(
        "input='in/0.txt' cannot be read: Input/output error; "
        "check the file and its disk"
    ):
        prepare.prepare([given], "out")


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Fails if files that Windows wrote begin with a character of their own."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + "é".encode())
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"text": "two"}\n')
    prepare.prepare(["a.txt", "b.jsonl"], "out", validation_fraction=0.0)
    assert read_split("out", "train") == [[*"é".encode(), 256], [*b"two", 256]]


@pytest.mark.parametrize("name", ["A.JSONL", "a.Parquet"])
def test_suffixes_may_have_capitals(name, tmp_path):
    """Fails if such files are read as plain text, with their braces."""
    write = write_json_lines if name == "A.JSONL" else write_parquet
    given = write(tmp_path / "in")
    (tmp_path / given).rename(tmp_path / name)
    prepare.prepare([name], "out", validation_fraction=0.0)
    assert read_split("out", "train") == [[*text.encode(), 256] for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl.gz", lambda lines: gzip.compress(lines.encode())),
        ("A.JSONL.BZ2", lambda lines: bz2.compress(lines.encode())),
        ("a.ndjson.xz", lambda lines: lzma.compress(lines.encode())),
        ("a.json", lambda lines: f"\n [{lines.replace(chr(10), ', ')}]".encode()),
        ("a.json", lambda lines: b"[\n" + lines.replace("\n", ",\n").encode() + b"]"),
    ],
)
def test_compressed_lines_and_arrays_are_read(name, write, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    [document] = documents.read_documents(tmp_path / "a.txt.gz", "text")
    assert document.text == "some text"
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / name).write_bytes(write(lines))
    found = list(documents.read_documents(tmp_path / name, "text"))
    assert [document.text for document in found] == TEXTS
    size = (tmp_path / name).stat().st_size
    assert sum(document.num_bytes for document in found) == size


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "a.tar.gz",
            gzip.compress(b"a.txt" + b"\0" * 507 + b"text", mtime=0),
            "is compressed in a form not read; decompress it (tar -xf) or leave it out",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b"x" * 99, mtime=0)[:-9],
            "is a damaged .gz file (Compressed file ended before the end-of-stream "
            "marker was reached); copy it again",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "' + b"x" * 99,
            "has more than 99 bytes in line 2; write one JSON object per line",
        ),
        (
            "a.json",
            b"[" + b" " * 99 + b"]",
            "is a JSON array of more than 99 bytes; write one JSON object per line "
            "(jq -c '.[]')",
        ),
    ],
)
def test_compressed_files_and_arrays_are_refused(
    name, content, problem, tmp_path, monkeypatch
):
    """Fails if the remedy is to convert what is compressed, or an array, to UTF-8."""
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 99)
    (tmp_path / name).write_bytes(content)
    with data_error(f"input='{name}' {problem}"):
        prepare.prepare([name], "out", validation_fraction=0.0)


def test_token_ids_and_labels_are_written_as_they_are(tmp_path):
    """Fails if ids get a BOS or an end, padding stays, or prompts have a loss."""
    rows = [
        {"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "attention_mask": [1, 1, 1]},
        {
            "input_ids": [5, 6, 0, 0],
            "labels": [-100, 6, -100, -100],
            "attention_mask": [1, 1, 0, 0],
        },
        {"input_ids": [], "labels": []},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = {"text_field": "input_ids", "validation_fraction": 0.0}
    for name, size in (("a.jsonl", 10), ("a.parquet", 70_000)):
        meta = prepare.prepare([name], f"out{size}", tokenizer=f"ids:{size}", **options)
        assert (meta.vocab_size, meta.has_answers) == (size, True)
        assert read_split(f"out{size}", "train") == [[7, 8, 9], [5, 6]]
        opened = store.open_store(f"out{size}", "train")
        assert opened.answers is not None
        assert opened.answers[:].tolist() == [0, 1, 1, 0, 1]
    assert store.open_tokenizer("out10").decode([7, 8]) == "7 8"
    assert store.digest_tokenizer("out10") != store.digest_tokenizer("out70000")


def test_streams_of_nanogpt_are_cut_at_end_tokens(tmp_path, monkeypatch):
    """Fails if a document that two blocks share is cut, or loses its end token."""
    monkeypatch.setattr(tables, "BLOCK_TOKENS", 3)
    ids = [1, 2, 9, 3, 4, 5, 6, 9, 9, 7]
    np.array(ids, "<u2").tofile(tmp_path / "train.bin")
    options = {"tokenizer": "ids:10", "validation_fraction": 0.0}
    prepare.prepare(["train.bin"], "out", **options)
    assert read_split("out", "train") == [[1, 2, 9], [3, 4, 5, 6, 9], [9], [7]]


def test_broken_records_are_left_out_and_counted(tmp_path, caplog):
    """Fails if one ends the command, is not counted, or good ones are lost."""
    lines = [b'{"text": "a"}', b'{"text": ', b'{"text": "\xe9"}', b'{"body": "b"}']
    lines += [b"[1]", b'{"text": 5}', b'{"text": "c"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.json").write_text('[{"text": "d"}, 5]')
    options = {"validation_fraction": 0.0, "skip_broken": True}
    prepare.prepare(["a.jsonl", "b.json"], "out", **options)
    texts = [bytes(ids[:-1]) for ids in read_split("out", "train")]
    assert texts == [b"a", b"c", b"d"]
    assert caplog.messages == [
        "broken records that were left out: 6; the first: input='a.jsonl' has broken "
        "JSON in line 2 (Expecting value: line 1 column 10 (char 9)); write one JSON "
        "object per line, or an array of objects"
    ]


def test_a_damaged_parquet_file_is_named(tmp_path):
    """Fails if an error of Arrow's own comes out, wherever a byte is wrong."""
    good = (tmp_path / write_parquet(tmp_path / "in")).read_bytes()
    named = 0
    for place in range(0, len(good), 23):
        damaged = bytearray(good)
        damaged[place] ^= 0xFF
        (tmp_path / "a.parquet").write_bytes(damaged)
        try:
            prepare.prepare(["a.parquet"], f"out{place}")
        except DataError:
            named += 1
    assert named


def test_more_held_out_than_asked_for_is_said(tmp_path, caplog):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 99)
    inputs = [f"{number}.txt" for number in range(10)]
    prepare.prepare(inputs, "out", validation_fraction=0.01)
    prepare.prepare(inputs, "other", validation_fraction=0.1)
    assert caplog.messages == [
        "validation_fraction=0.01 holds out 10.0 % of the tokens: documents are held "
        "out whole; give more of them, or smaller ones"
    ]


def test_arguments_of_another_type_are_named():
    """Python passes them; flags have one type each."""
    with data_error(
        "inputs='a.txt' is a single path; give a list of paths\n"
        "validation_fraction='x' is not a number; use 0 or more and less than 1\n"
        "tokenizer=5 is not a text; give a text"
    ):
        prepare.check_types("a.txt", "o", "x", tokenizer=5, text_field="text", chat="")
    with data_error(
        "inputs=5 is not a path; give a text\noutput=None is not a path; give a text"
    ):
        prepare.check_types(["a.txt", 5], None, 0.1)
    with pytest.raises(DataError, match="inputs=None is no list; give a list of paths"):
        prepare.check_types(None, "o", 0.1)
