"""Directories that the `datasets` library saved, with and without that library."""

import json

import pyarrow
import pytest

from tests.support.refusals import data_error
from zjax.data import prepare, tables
from zjax.errors import DataError

TEXTS = [f"text number {i}" for i in range(40)]


def save(folder, texts=TEXTS, num_files=2, batch_rows=7):
    """Writes what `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{num_files:05}.arrow" for i in range(num_files)]
    size = -(-len(texts) // num_files)
    for number, name in enumerate(names):
        part = texts[number * size : (number + 1) * size]
        table = pyarrow.table({"id": [*range(len(part))], "text": part})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table, max_chunksize=batch_rows)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def files_of(folder):
    names = ("train.bin", "train.idx", "validation.bin")
    return [(folder / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Token files of the same texts as lines."""
    folder = tmp_path_factory.mktemp("lines")
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (folder / "a.jsonl").write_text(lines)
    prepare.prepare([folder / "a.jsonl"], folder / "tokens", validation_fraction=0.1)
    return files_of(folder / "tokens")


@pytest.mark.parametrize("rows", [1_024, 3])
def test_saved_rows_have_the_tokens_of_lines(rows, expected, tmp_path, monkeypatch):
    """Fails if rows are lost at the end of a batch or a file, or info is read as text.

    Rows are held out by their bytes, so that a wrong order shows.
    """
    monkeypatch.setattr(tables, "BATCH_ROWS", rows)
    given = save(tmp_path / "saved")
    prepare.prepare([given], tmp_path / "tokens", validation_fraction=0.1)
    assert files_of(tmp_path / "tokens") == expected


def test_a_folder_of_saved_datasets_is_read_as_these(expected, tmp_path):
    """Fails if what describes a dataset is read as text beside it."""
    half = len(TEXTS) // 2
    save(tmp_path / "many" / "a", TEXTS[:half])
    save(tmp_path / "many" / "b", TEXTS[half:])
    (tmp_path / "many" / "loop").symlink_to(tmp_path)
    prepare.prepare([tmp_path / "many"], tmp_path / "tokens", validation_fraction=0.1)
    assert files_of(tmp_path / "tokens") == expected


def test_the_library_itself_writes_so(expected, tmp_path):
    """Fails if the library saves otherwise than `save` does."""
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    made = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    made.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    prepare.prepare([tmp_path / "saved"], tmp_path / "tokens", validation_fraction=0.1)
    assert files_of(tmp_path / "tokens") == expected


def break_splits(folder):
    for name in ("train", "test"):
        save(folder / name, num_files=1)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def break_state(folder):
    (save(folder) / "state.json").write_text('{"_data_files": 3}')


def break_order(folder):
    path = save(folder) / "state.json"
    state = json.loads(path.read_text()) | {"_indices_data_files": [{"filename": "i"}]}
    path.write_text(json.dumps(state))


def lose_file(folder):
    (save(folder) / "data-00001-of-00002.arrow").unlink()


def lose_column(folder):
    save(folder, num_files=1)
    path = folder / "data-00000-of-00001.arrow"
    table = pyarrow.table({"id": [1], "body": ["a"]})
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def repeat_column(folder):
    save(folder, num_files=1)
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    path = folder / "data-00000-of-00001.arrow"
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def break_file(folder):
    (save(folder, num_files=1) / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")


def cut_file(folder):
    """Leaves three whole batches."""
    path = save(folder, num_files=1) / "data-00000-of-00001.arrow"
    with pyarrow.memory_map(str(path)) as file:
        stream = pyarrow.ipc.open_stream(file)
        for _ in range(3):
            stream.read_next_batch()
        whole = file.tell()
    path.write_bytes(path.read_bytes()[:whole])
    with pyarrow.memory_map(str(path)) as file:
        assert pyarrow.ipc.open_stream(file).read_all().num_rows == 21


SPLITS = "holds the splits test, train; give one of them, such as {}/test"
AGAIN = "leave it out or make it again"
ROWS = "/data-00000-of-00001.arrow"


@pytest.mark.parametrize(
    ("make", "place", "expected"),
    [
        (break_splits, "", SPLITS),
        (
            break_state,
            "",
            "has a broken state.json (TypeError: 'int' object is not iterable); "
            f"{AGAIN}",
        ),
        (break_order, "", f"has rows in another order; {AGAIN}"),
        (lose_file, "", f"lacks data-00001-of-00002.arrow; {AGAIN}"),
        (
            lose_column,
            ROWS,
            "has no column 'text', only id, body; choose another text_field",
        ),
        (repeat_column, ROWS, "has 2 columns 'text'; rename all but one"),
        (break_file, ROWS, f"is not an Arrow stream, the form of datasets; {AGAIN}"),
        (cut_file, ROWS, f"is cut off: its stream of rows has no end; {AGAIN}"),
    ],
)
def test_directory_or_its_file_is_refused(make, place, expected, tmp_path):
    """Fails if rows are read that the library would not give, or an error of Arrow's
    own comes out."""
    folder = tmp_path / "saved"
    make(folder)
    with data_error(f"input='{folder}{place}' {expected.format(folder)}"):
        prepare.prepare([folder], tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_a_damaged_file_is_named(tmp_path):
    """Fails if a wrong byte ends the process, or an error of Arrow's own comes out."""
    path = save(tmp_path / "saved", num_files=1) / "data-00000-of-00001.arrow"
    good, named = path.read_bytes(), 0
    for place in range(0, len(good), 41):
        damaged = bytearray(good)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            prepare.prepare([tmp_path / "saved"], tmp_path / f"out{place}")
        except DataError:
            named += 1
    assert named
    for size in range(8, len(good), 40):
        path.write_bytes(good[:size])
        with pytest.raises(DataError, match=r"is not an Arrow stream|is cut off"):
            prepare.prepare([tmp_path / "saved"], tmp_path / f"cut{size}")
