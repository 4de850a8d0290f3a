"""The analyzer against loops, resumed after kills, in one process and in several."""

import fcntl
import os
import pathlib
import sys
import textwrap

import numpy as np
import pytest

from tests.support import programs
from tests.support.refusals import data_error, process_error
from zjax.data import analyze, metrics, packing, source
from zjax.errors import ProcessError
from zjax.settings import schema

ROOT = pathlib.Path(__file__).parents[2]
VOCAB, LENGTH, SHARD_ROWS = 50, 12, 7


def make_rows(kind="documents", seed=0):
    """About 50 rows."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 20, 60)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = (generator.zipf(1.2, offsets[-1]) % VOCAB).astype(np.uint16)
    if kind == "documents":
        return packing.DocumentRows(tokens, offsets, LENGTH)
    return packing.BlockRows(tokens, LENGTH)


def run(output, names, rows=None, **changes):
    settings = {"vocab_size": VOCAB, "digest": "abcd", "shard_rows": SHARD_ROWS}
    rows = make_rows() if rows is None else rows
    return analyze.analyze(rows, output, names, **settings | changes)


def expected(rows, name):
    """Index computed with all samples in memory at once."""
    fields = rows.read(np.arange(len(rows)))
    tokens = fields["tokens"]
    is_token = fields.get("segment_ids", np.ones_like(tokens)) > 0
    metric = metrics.make_metric(
        name,
        length=LENGTH,
        vocab_size=VOCAB,
        counts=np.bincount(tokens[is_token], minlength=VOCAB),
    )
    values = metric(metrics.Batch(np.arange(len(rows)), tokens, is_token)).tolist()
    return sorted((value, number) for number, value in enumerate(values))


def pairs(index):
    return list(zip(index.values.tolist(), index.samples.tolist(), strict=True))


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """A module of the caller that writes down each sample, which begins with its sum.

    It blocks at the sum in the file `block`, if there is one.
    """
    (tmp_path / "logged_scores.py").write_text(
        textwrap.dedent(f"""
        import math, os, pathlib, time
        folder = pathlib.Path({str(tmp_path)!r})
        def score(tokens):
            total = int(tokens.sum())
            with open(folder / "log", "a") as log:
                log.write(f"{{total}}\\n")
            block = folder / "block"
            while block.exists() and total == int(block.read_text()):
                time.sleep(0.01)
            return total
        def nan(tokens):
            return math.nan if int(tokens.sum()) == 30 else 0
        def die(tokens):
            os.kill(os.getpid(), 9)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("logged_scores", None)


class NumberedRows:
    """Rows whose sum is their number."""

    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def read(self, indices):
        """Reads rows of one token that is not 0."""
        tokens = np.zeros((len(indices), 3), np.int32)
        tokens[:, 1] = indices
        return {"tokens": tokens}

    def digest(self):
        """Is not asked for."""
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["documents", "blocks"])
@pytest.mark.parametrize("shard_rows", [0, 1, 7, 1000])
def test_indexes_are_those_of_loops(tmp_path, monkeypatch, kind, shard_rows):
    """Fails if padding counts, or samples or counts of a shard or batch are lost."""
    monkeypatch.setattr(analyze, "BATCH_ROWS", 3)
    rows = make_rows(kind)
    found = run(tmp_path / "new" / "out", metrics.METRICS, rows, shard_rows=shard_rows)
    assert list(found) == list(metrics.METRICS)
    for name in metrics.METRICS:
        assert pairs(found[name]) == expected(rows, name)
    files = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert files == sorted(f"{name}.index" for name in metrics.METRICS)


def test_processes_change_no_bit(tmp_path, scores):
    names = [*metrics.METRICS, "logged_scores:score"]
    run(tmp_path / "one", names)
    run(tmp_path / "two", names, num_processes=2)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == len(names)
    for name in files:
        one, two = (tmp_path / folder / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


NAMES = ["logged_scores:score", "voc"]
PROGRAM = """
from tests.data.test_analyze import NAMES, NumberedRows, run

if __name__ == "__main__":
    run({output!r}, NAMES, NumberedRows(45), num_processes={n})
"""


def shards_in(output):
    """Shards of samples that are finished."""
    return {int(path.name[-4:]) for path in output.glob("shards-*/values-*")}


def descendants(pid):
    listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    children = list(map(int, listed.split()))
    return children + [x for child in children for x in descendants(child)]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_run_loses_no_finished_shard(scores, num_processes):
    """Fails if a finished shard is measured again, or processes outlive a kill."""
    (scores / "block").write_text("31")  # of shard 4, which is never finished
    output, program = scores / "out", scores / "program.py"
    program.write_text(PROGRAM.format(output=str(output), n=num_processes))
    finished = {0, 1, 2, 3} if num_processes == 1 else {0, 1, 2, 3, 5, 6}
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{scores}"}
    with programs.started([sys.executable, program], env=environ) as started:
        programs.wait_until(lambda: shards_in(output) == finished, started)
        processes = [started.pid, *descendants(started.pid)]
        assert len(processes) == (1 if num_processes == 1 else 4)  # and a tracker
        started.kill()
        started.wait()
        # they end by themselves
        programs.wait_until(lambda: not any(map(programs.is_alive, processes)))
    assert shards_in(output) == finished
    (scores / "block").unlink()
    (scores / "log").unlink()
    found = run(output, NAMES, NumberedRows(45))
    measured = sorted(map(int, (scores / "log").read_text().split()))
    assert measured == [n for n in range(45) if n // SHARD_ROWS not in finished]
    assert pairs(found["logged_scores:score"]) == [(n, n) for n in range(45)]
    run(scores / "whole", NAMES, NumberedRows(45))
    for name in ("voc.index", "logged_scores.score.index"):
        assert (output / name).read_bytes() == (scores / "whole" / name).read_bytes()


def stop_at(monkeypatch, number):
    """Ends the writing of shards before this one of all maps, as a kill would."""
    written = []

    def write(job, kind, shard, columns, whole=analyze.Job.write):
        if len(written) == number:
            raise KeyboardInterrupt
        written.append((kind, shard))
        whole(job, kind, shard, columns)

    monkeypatch.setattr(analyze.Job, "write", write)
    return written


def test_a_run_that_is_stopped_anywhere_continues_there(scores, monkeypatch):
    """Fails if tokens are counted twice, or a shard is computed twice."""
    rows = NumberedRows(45)
    run(scores / "whole", NAMES, rows)
    everything = [("counts", n) for n in range(7)] + [("total", 0)]
    everything += [("values", n) for n in range(7)]
    for number in range(len(everything)):
        output = scores / str(number)
        with monkeypatch.context() as patch:
            first = stop_at(patch, number)
            with pytest.raises(KeyboardInterrupt):
                run(output, NAMES, rows)
        with monkeypatch.context() as patch:
            second = stop_at(patch, -1)
            run(output, NAMES, rows)
        assert first + second == everything
        for name in ("voc.index", "logged_scores.score.index"):
            one, two = (folder / name for folder in (output, scores / "whole"))
            assert one.read_bytes() == two.read_bytes()


def test_a_run_that_is_stopped_between_indexes_continues(tmp_path, monkeypatch):
    """Fails if the finished index is taken for that of another run."""

    def write(path, name, *others, whole=analyze.write_index):
        if name == "voc":
            raise KeyboardInterrupt
        whole(path, name, *others)

    names = ["seqreo", "voc"]
    with monkeypatch.context() as patch:
        patch.setattr(analyze, "write_index", write)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", names)
    assert [path.name for path in tmp_path.glob("out/*.index")] == ["seqreo.index"]
    found = run(tmp_path / "out", names)
    assert pairs(found["voc"]) == expected(make_rows(), "voc")


@pytest.mark.parametrize("change", ["metrics", "digest", "shard_rows", "source"])
def test_shards_of_another_job_are_not_used(scores, monkeypatch, change):
    """Fails if a run continues that had other data, metrics or functions."""
    rows, names = NumberedRows(45), ["logged_scores:score", "seqreo"]
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            run(scores / "out", names, rows)
    changes = {}
    if change == "metrics":
        names = names[::-1]
    elif change == "source":
        with (scores / "logged_scores.py").open("a") as file:
            file.write("# another\n")
    else:
        changes = {"digest": "efgh"} if change == "digest" else {"shard_rows": 11}
    written = stop_at(monkeypatch, -1)
    found = run(scores / "out", names, rows, **changes)
    assert len(written) == (5 if change == "shard_rows" else 7)
    assert pairs(found["logged_scores:score"]) == [(n, n) for n in range(45)]


def test_a_damaged_shard_is_computed_anew(tmp_path, monkeypatch, caplog):
    """Fails if it is read, or ends the run."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            run("out", ["seqreo"])
    (folder,) = (tmp_path / "out").iterdir()
    first, second = folder / "values-0001", folder / "values-0002"
    first.write_bytes(first.read_bytes()[:-8])
    second.write_bytes((folder / "values-0003").read_bytes())
    written = stop_at(monkeypatch, -1)
    found = run("out", ["seqreo"])
    assert {("values", 1), ("values", 2)} <= set(written)
    assert not {("values", 0), ("values", 3)} & set(written)
    assert pairs(found["seqreo"]) == expected(make_rows(), "seqreo")
    shard = f"shard='out/{folder.name}/values-000"
    remedy = "the same command computes it anew"
    assert caplog.messages == [
        f"{shard}1' is truncated: 368 bytes, but its header says 376; {remedy}",
        f"{shard}2' is that of another; {remedy}",
    ]


def test_a_metric_of_nan_is_named_with_its_sample(scores):
    with data_error(
        "metrics='logged_scores:nan' gives nan for sample 30; "
        "return a finite number of 0 or more"
    ):
        run(scores / "out", ["seqreo", "logged_scores:nan"], NumberedRows(45))
    assert list(scores.glob("out/*.index")) == []


def test_a_process_that_dies_is_reported(scores):
    with process_error(
        "num_processes=2 lost a process, which was killed or could not start; "
        "type the same command again: finished shards remain"
    ):
        run(scores / "out", ["logged_scores:die"], NumberedRows(9), num_processes=2)


def test_two_runs_do_not_write_the_same_shards(tmp_path):
    rows, names = make_rows(), ("seqreo",)
    job = analyze.Job(rows, names, VOCAB, "abcd", SHARD_ROWS, tmp_path / "out")
    job.folder.mkdir(parents=True)
    with open(job.folder / "lock.json", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ProcessError, match="is in use by another run"):
            run(tmp_path / "out", names, rows)
    run(tmp_path / "out", names, rows)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    with data_error(
        "token=41 in sample 40 is beyond the vocabulary of 40; prepare the data again"
    ):
        run(tmp_path / "out", ["voc"], NumberedRows(45), vocab_size=40)


def test_an_index_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("out", ["seqreo"])
    before = (tmp_path / "out" / "seqreo.index").read_bytes()
    with data_error(
        "output='out' holds seqreo.index already; remove it, or name another folder"
    ):
        run("out", ["voc", "seqreo"], digest="efgh")
    assert (tmp_path / "out" / "seqreo.index").read_bytes() == before
    run("out", ["voc"])
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["seqreo.index", "voc.index"]


def test_all_mistakes_are_named_at_once(tmp_path):
    names = ["seqreo", "rarity", "seqreo"]
    with data_error(
        "metrics='rarity' is not a metric; use seqreo, voc, seqreo_voc, compression or "
        "module:function\n"
        "metrics='seqreo' is given twice; leave one out\n"
        "num_processes=0 is not a number of processes; use 1 or more\n"
        "shard_rows=-1 is not a number of samples; use 1 or more, or 0\n"
        "rows=0 is no data; use data.source='tokens' or 'standard_library'"
    ):
        run(tmp_path / "out", names, NumberedRows(0), num_processes=0, shard_rows=-1)
    assert not (tmp_path / "out").exists()
    with data_error(f"digest='{'d' * 33}' is longer than 32 bytes; use a shorter one"):
        run(tmp_path / "out", ["seqreo"], digest="d" * 33)
    with data_error(
        "metrics='' names none; use some of seqreo, voc, seqreo_voc, compression"
    ):
        run(tmp_path / "out", [])


def test_endless_data_is_refused(tmp_path):
    config = schema.Config(data=schema.Data(source="synthetic", length=8))
    with data_error(
        "rows=1099511627776 is not below 1099511627776; "
        "use data.source='tokens' or 'standard_library'"
    ):
        run(tmp_path / "out", ["seqreo"], source.open_rows(config, "train"))


@pytest.mark.parametrize(
    ("output", "problem"),
    {
        "": "is empty; give a path; . is this directory",
        "file/out": (
            "cannot be written: Not a directory; name a folder that can be made, on a "
            "disk with room"
        ),
    }.items(),
)
def test_an_output_that_cannot_be_made(tmp_path, monkeypatch, output, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with data_error(f"output='{output}' {problem}"):
        run(output, ["seqreo"])


@pytest.mark.parametrize(
    "change", [{"length": 9}, {"packing": "documents"}, {"source": "tokens"}]
)
def test_the_digest_is_of_rows_and_not_only_of_text(monkeypatch, change):
    """Fails if an index would serve rows of another length or packing."""

    def digest(**data):
        config = schema.Config(data=schema.Data(**{"length": 8} | data))
        return source.digest_samples(config.data, make_rows())

    monkeypatch.setattr(source.store, "digest_tokenizer", lambda path: "words")
    assert digest() == digest()
    assert digest(**change) != digest()
    config = schema.Config(data=schema.Data(length=8))
    assert source.digest_samples(config.data, make_rows(seed=1)) != digest()
