"""What lands on disk is what was written, also when a run is continued."""

import csv
import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tests.observe.disk import full_disk
from tests.support.refusals import config_error, output_error
from zjax.errors import OutputError
from zjax.observe import make_sinks, read_history
from zjax.observe.history import HISTORY, check_directory
from zjax.settings import schema


def open_sink(name, directory, last_step=0):
    observe = schema.Observe(sinks=(name,))
    (sink,) = make_sinks(observe, directory, {}, num_steps=1_000, last_step=last_step)
    return sink


def write(name, directory, rows, last_step=0):
    sink = open_sink(name, directory, last_step)
    for step, values in rows:
        sink.write(step, values)
    sink.close()


def read_table(directory):
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def read_events(directory):
    """(session start?, step, {label: value}) of every record, in order of the files."""
    events = []
    for path in sorted((directory / "tensorboard").iterdir()):
        raw = path.read_bytes()
        while raw:
            (size,) = struct.unpack("<Q", raw[:8])
            event = event_pb2.Event.FromString(raw[12 : 12 + size])
            raw = raw[size + 16 :]
            values = {v.tag: v.simple_value for v in event.summary.value}
            is_start = event.HasField("session_log")
            if is_start or values:
                events.append((is_start, event.step, values))
    return events


def test_history_is_what_was_written(tmp_path):
    assert read_history(tmp_path / HISTORY) == []
    rows = [(1, {"loss": 2.5}), (2, {"loss": 0.1, "grad_norm": 1e-30})]
    write("jsonl", tmp_path, rows)
    lines = (tmp_path / HISTORY).read_text().splitlines()
    assert lines[0] == '{"step": 1, "loss": 2.5}'
    assert read_history(tmp_path / HISTORY) == [{"step": n, **v} for n, v in rows]


def test_a_line_is_on_disk_before_the_sink_is_closed(tmp_path):
    sink = open_sink("jsonl", tmp_path)
    sink.write(1, {"loss": 2.5})
    assert read_history(tmp_path / HISTORY) == [{"step": 1, "loss": 2.5}]
    sink.close()


def test_values_that_json_lacks_survive_in_strict_json(tmp_path):
    write("jsonl", tmp_path, [(1, {"a": math.nan, "b": math.inf, "c": -math.inf})])
    line = (tmp_path / HISTORY).read_text()
    assert json.loads(line, parse_constant=pytest.fail)["b"] == "Infinity"
    (row,) = read_history(tmp_path / HISTORY)
    np.testing.assert_equal(
        row, {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf}
    )


def steps_on_disk(name, directory):
    if name == "jsonl":
        return [row["step"] for row in read_history(directory / HISTORY)]
    return [int(row[0]) for row in read_table(directory)[1:]]


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_continued_run_drops_later_steps_and_goes_on(name, tmp_path):
    write(name, tmp_path, [(n, {"loss": 1.0}) for n in (10, 20, 30, 40)])
    write(name, tmp_path, [(n, {"loss": 2.0}) for n in (25, 30)], last_step=20)
    assert steps_on_disk(name, tmp_path) == [10, 20, 25, 30]


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_new_run_starts_a_new_file(name, tmp_path):
    write(name, tmp_path, [(0, {"eval_loss": 9.0}), (10, {"loss": 1.0})])
    write(name, tmp_path, [(5, {"loss": 2.0})])
    assert steps_on_disk(name, tmp_path) == [5]


@pytest.mark.parametrize("name", ["jsonl", "csv"])
@pytest.mark.parametrize("num_lost", [1, 3, 6])
def test_a_line_cut_short_by_a_crash_is_dropped(name, num_lost, tmp_path):
    write(name, tmp_path, [(10, {"loss": 1.25}), (20, {"loss": 1.25})])
    path = tmp_path / {"jsonl": HISTORY, "csv": "metrics.csv"}[name]
    path.write_text(path.read_text()[:-num_lost])
    write(name, tmp_path, [(21, {"loss": 2.0})], last_step=20)
    assert steps_on_disk(name, tmp_path) == [10, 21]


def test_a_new_label_becomes_a_new_column(tmp_path):
    """Also one with a comma."""
    write("csv", tmp_path, [(1, {"loss, mean": 2.5}), (2, {"eval_loss": 3.0}), (3, {})])
    expected = [["step", "loss, mean", "eval_loss"], ["1", "2.5", ""], ["2", "", "3.0"]]
    assert read_table(tmp_path) == [*expected, ["3", "", ""]]


def test_tensorboard_hides_the_steps_that_a_continued_run_repeats(tmp_path):
    write("tensorboard", tmp_path, [(20, {"loss": 2.5}), (30, {"loss": 2.0})])
    points = [event[1:] for event in read_events(tmp_path) if not event[0]]
    assert points == [(20, {"loss": 2.5}), (30, {"loss": 2.0})]
    write("tensorboard", tmp_path, [(21, {"loss": 1.0})], last_step=20)
    starts = [step for is_start, step, _ in read_events(tmp_path) if is_start]
    assert starts == [0, 21]


def test_sinks_come_in_the_order_they_are_named(tmp_path):
    observe = schema.Observe(sinks=("csv", "console", "jsonl"))
    sinks = make_sinks(observe, tmp_path / "new", {}, num_steps=1_000)
    names = [type(sink).__name__ for sink in sinks]
    for sink in sinks:
        sink.close()
    assert names == ["Csv", "Progress", "JsonLines"]


@pytest.mark.parametrize(
    ("name", "file"),
    [("jsonl", HISTORY), ("csv", "metrics.csv"), ("tensorboard", "tensorboard")],
)
def test_a_full_disk_is_said_by_write_and_by_close(name, file, tmp_path):
    sink = open_sink(name, tmp_path)
    with full_disk(12):
        for use in (lambda: sink.write(1, {"loss": 2.5}), sink.close):
            with output_error(
                f"directory='{tmp_path}' cannot be written ({file}: File too large); "
                "free disk space or repair the file system, and run again"
            ):
                use()


def test_a_full_disk_is_said_when_the_files_of_a_run_are_opened(tmp_path):
    write("jsonl", tmp_path, [(1, {"loss": 2.5})])
    with full_disk(8), pytest.raises(OutputError) as error:
        open_sink("jsonl", tmp_path, last_step=1)
    assert str(error.value) == (
        f"directory='{tmp_path}' cannot be written ({HISTORY}: File too large); "
        "free disk space or repair the file system, and run again"
    )
    assert read_history(tmp_path / HISTORY) == [{"step": 1, "loss": 2.5}]


def test_a_directory_in_the_way_and_a_history_that_never_ends(tmp_path):
    (tmp_path / HISTORY).mkdir()
    with output_error(
        f"directory='{tmp_path}' cannot be written ({HISTORY}: Is a directory); move "
        "the directory that is in its way, and run again"
    ):
        open_sink("jsonl", tmp_path)
    (tmp_path / HISTORY).rmdir()
    (tmp_path / HISTORY).symlink_to("/dev/zero")
    with pytest.raises(OutputError, match="it is not a regular file of up to"):
        write("jsonl", tmp_path, [(2, {"loss": 1.0})], last_step=1)


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("{tmp}/file", "File exists"),
        ("{tmp}/file/below", "Not a directory"),
        ("/proc/zz", "No such file or directory"),
    ],
    ids=["file", "below-a-file", "proc"],
)
def test_a_directory_that_cannot_be_used(path, cause, tmp_path):
    (tmp_path / "file").write_text("")
    path = path.format(tmp=tmp_path)
    for use in (lambda: open_sink("csv", path), lambda: check_directory(path)):
        with config_error(
            f"directory='{path}' cannot be used ({cause}); name a writable directory"
        ):
            use()
    check_directory(f"{tmp_path}/a/b")
    assert [*(tmp_path / "a" / "b").iterdir()] == []


DAMAGE = {
    "cut-in-the-middle": b'{"step": 3, "lo',
    "no-object": b"[3]",
    "no-step": b'{"loss": 1.0}',
    "step-as-text": b'{"step": "3", "loss": 1.0}',
    "step-beyond": b'{"step": 4611686018427387904, "loss": 1.0}',
    "value-as-list": b'{"step": 3, "loss": [1.0]}',
    "nested": b"[" * 10**5,
    "long": b"x" * 10**6,
    "no-text": b"\xff\xfe\x00",
    "many-digits": b'{"step": 3, "loss": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_damaged_line_costs_no_other(name, line, tmp_path, caplog):
    """Fails if what follows it is lost, or the file is rewritten without a copy."""
    write(name, tmp_path, [(n, {"loss": 1.0}) for n in (1, 2, 4)])
    path = tmp_path / {"jsonl": HISTORY, "csv": "metrics.csv"}[name]
    lines = path.read_bytes().splitlines()
    damaged = b"\n".join([*lines[:-1], line, lines[-1], b""])
    path.write_bytes(damaged)
    write(name, tmp_path, [(5, {"loss": 2.0})], last_step=4)
    assert steps_on_disk(name, tmp_path) == [1, 2, 4, 5]
    assert (tmp_path / f"{path.name}.damaged").read_bytes() == damaged
    assert caplog.messages == [
        f"{path}: 1 lines cannot be read; a copy of the file is {path.name}.damaged"
    ]


def test_reading_a_damaged_history_says_so(tmp_path, caplog):
    write("jsonl", tmp_path, [(1, {"loss": 1.0})])
    path = tmp_path / HISTORY
    no_numbers = ('[["3"]]', "[[1], [2, 3]]", "[{}]")
    lists = "".join(f'{{"step": 1, "load": {text}}}\n' for text in no_numbers)
    path.write_text(f"null\n{lists}{path.read_text()}")
    assert read_history(path) == [{"step": 1, "loss": 1.0}]
    assert caplog.messages == [f"{path}: 4 lines cannot be read"]


def test_arrays_are_in_the_history_and_nowhere_else(tmp_path, capsys):
    """Fails if a sink that takes numbers alone gets an array."""
    values = {"loss": 2.5, "load": [[3, 1], [2, 2]]}
    for name in ("jsonl", "csv", "tensorboard", "console"):
        write(name, tmp_path, [(1, values)])
    write("jsonl", tmp_path, [(2, values)], last_step=1)
    rows = read_history(tmp_path / HISTORY)
    assert rows == [{"step": 1, **values}, {"step": 2, **values}]
    assert read_table(tmp_path) == [["step", "loss"], ["1", "2.5"]]
    assert [set(each[2]) for each in read_events(tmp_path)] == [set(), {"loss"}]
    assert capsys.readouterr().out == "step    1/1000  loss 2.5000\n"
