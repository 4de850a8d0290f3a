"""Measures all samples of a dataset before training: `zjax data analyze`.

A map over shards of consecutive samples, in processes, then a reduce that sorts the
samples. Each finished shard is a file, so that a killed run resumes with the unfinished
shards. Metrics of rarity take two maps: the first counts tokens, the second measures
samples.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from absl import logging
from rich import console, progress

from zjax.data import metric_index, metrics, packing
from zjax.data.metric_index import Index, index_path, open_index, write_index
from zjax.errors import DataError, Problem, ProcessError
from zjax.files import local_path, make_directory
from zjax.processes import member_files

BATCH_ROWS = 64
"""Samples that a worker reads at a time."""
# Small shards cost files, large shards lose more work when a run is killed.
MIN_SHARD_ROWS, MAX_SHARDS = 64, 256
_COUNT, _TOTAL, _MEASURE = "counts", "total", "values"
"""Kinds of shards: token counts, the sum of counts over all shards, values of
samples."""

MapShards = Callable[[str, Sequence[int]], Iterable[int]]
"""Function from a map and its shards to the numbers of samples, as they finish."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Inputs that determine the content of every shard."""

    rows: packing.Rows
    metrics: tuple[str, ...]
    vocab_size: int
    digest: str
    shard_rows: int
    output: pathlib.Path

    @functools.cached_property
    def key(self) -> str:
        """Checksum of all inputs of the shards; user modules count by source."""
        settings = [self.metrics, self.vocab_size, self.digest, self.shard_rows]
        checksum = hashlib.sha256(json.dumps(settings).encode())
        # A changed function must not continue with values of the old function.
        for name in self.metrics:
            if ":" in name:
                module = importlib.import_module(name.partition(":")[0])
                if source := getattr(module, "__file__", None):
                    checksum.update(pathlib.Path(source).read_bytes())
        return checksum.hexdigest()[:16]

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the shards, until the indexes are complete."""
        return self.output / f"shards-{self.key}"

    @property
    def needs_counts(self) -> bool:
        """Whether a metric reads how often each token occurs."""
        return any(map(metrics.needs_counts, self.metrics))

    @property
    def num_shards(self) -> int:
        """Number of shards, of which the last may be shorter."""
        return -(-len(self.rows) // self.shard_rows)

    def span(self, shard: int) -> range:
        """Numbers of the samples of a shard."""
        start = shard * self.shard_rows
        return range(start, min(start + self.shard_rows, len(self.rows)))

    def path(self, kind: str, shard: int) -> pathlib.Path:
        """File of a shard of one kind."""
        return self.folder / f"{kind}-{shard:04}"

    def write(self, kind: str, shard: int, columns: Sequence[np.ndarray]) -> None:
        """Writes a finished shard."""
        name = f"{kind} {shard}"
        path = self.path(kind, shard)
        metric_index.write_columns(path, columns, digest=self.key, name=name)

    def read(self, kind: str, shard: int) -> list[np.ndarray]:
        """Maps the columns of a finished shard: one per metric, or the counts."""
        dtypes = ["<f8"] * len(self.metrics) if kind == _MEASURE else ["<i8"]
        path, remedy = self.path(kind, shard), "the same command computes it anew"
        opened = metric_index.open_columns(path, dtypes, field="shard", remedy=remedy)
        # A shard that was renamed, or is of another job, has intact checksums, too.
        if (opened.digest, opened.name) != (self.key, f"{kind} {shard}"):
            raise DataError(Problem("shard", str(path), "is that of another", remedy))
        return opened.arrays

    def is_finished(self, kind: str, shard: int) -> bool:
        """Whether a shard exists and is intact; a damaged shard is computed anew."""
        if not self.path(kind, shard).exists():
            return False
        try:
            self.read(kind, shard)
        except DataError as error:
            logging.warning("%s", error)
            return False
        return True


def analyze(
    rows: packing.Rows,
    output: str | os.PathLike[str],
    metric_names: Sequence[str],
    *,
    vocab_size: int,
    digest: str,
    num_processes: int = 1,
    shard_rows: int = 0,
) -> dict[str, Index]:
    """Measures every sample and writes an index per metric into a folder.

    A repeated call continues where a killed call stopped. With several processes, guard
    the script by `if __name__ == "__main__":`, since each process imports the script.

    Args:
        rows: Samples of the dataset; see `zjax.data.source.open_rows`.
        output: Folder of the indexes, created if missing.
        metric_names: Names of `zjax.data.metrics.METRICS`, or `module:function` of the
            caller: from the tokens of a sample, int32[n] without padding, to a number
            of 0 or more.
        vocab_size: Number of token ids; all ids are below it.
        digest: Digest of the dataset, at most 32 bytes, which `open_index` compares;
            see `zjax.data.source.digest_samples`.
        num_processes: Number of worker processes; 1 works in this process.
        shard_rows: Samples per shard; 0 makes at most `MAX_SHARDS` shards.

    Returns:
        Opened index of each metric.

    Raises:
        DataError: A metric is unknown, or gives NaN, infinity or a negative number; the
            folder holds an index of a metric already, or cannot be written.
        ProcessError: A process died, and finished shards remain; or another run works
            on these shards.
    """
    output = pathlib.Path(local_path("output", output, DataError, creates=True))
    _check(rows, metric_names, digest, num_processes, shard_rows)
    shard_rows = shard_rows or max(MIN_SHARD_ROWS, -(-len(rows) // MAX_SHARDS))
    job = Job(rows, tuple(metric_names), vocab_size, digest, shard_rows, output)
    paths = {name: index_path(output, name) for name in job.metrics}
    with _output_errors(output):
        # A folder of shards means a killed run, which may have written some indexes.
        if not job.folder.exists():
            _refuse_existing(paths)
        make_directory(job.folder)
        # Two runs of one job would write the same shards.
        member_files.acquire(str(job.folder))
        with (
            _start_processes(job, num_processes) as map_shards,
            progress.Progress(console=console.Console(stderr=True)) as bar,
        ):
            # Rarity needs counts of the whole dataset before the first sample is
            # measured.
            if job.needs_counts and not job.is_finished(_TOTAL, 0):
                _map(job, _COUNT, map_shards, bar)
                job.write(_TOTAL, 0, [_sum_counts(job)])
            _map(job, _MEASURE, map_shards, bar)
        _reduce(job, paths)
        # Last: a run killed during the reduce repeats the reduce from the shards.
        shutil.rmtree(job.folder)
    return {name: open_index(path, digest) for name, path in paths.items()}


def _check(
    rows: packing.Rows,
    metric_names: Sequence[str],
    digest: str,
    num_processes: int,
    shard_rows: int,
) -> None:
    """Raises all problems of the arguments of `analyze` at once."""
    problems = list[Problem]()
    if not metric_names:
        remedy = f"use some of {', '.join(metrics.METRICS)}"
        problems.append(Problem("metrics", "", "names none", remedy))
    for position, name in enumerate(metric_names):
        if name in metric_names[:position]:
            problems.append(Problem("metrics", name, "is given twice", "leave one out"))
        elif name not in metrics.METRICS:
            try:
                metrics.load_function(name)
            except DataError as error:
                problems += error.problems
    texts = [("digest", digest, metric_index.DIGEST_BYTES)]
    texts += [("metrics", name, metric_index.NAME_BYTES) for name in metric_names]
    for field, text, longest in texts:
        if len(text.encode()) > longest:
            problem, remedy = f"is longer than {longest} bytes", "use a shorter one"
            problems.append(Problem(field, text, problem, remedy))
    if num_processes < 1:
        problem, remedy = "is not a number of processes", "use 1 or more"
        problems.append(Problem("num_processes", num_processes, problem, remedy))
    if shard_rows < 0:
        problem, remedy = "is not a number of samples", "use 1 or more, or 0"
        problems.append(Problem("shard_rows", shard_rows, problem, remedy))
    if not 0 < len(rows) < metric_index.MAX_ROWS:
        problem = f"is not below {metric_index.MAX_ROWS}" if len(rows) else "is no data"
        remedy = "use data.source='tokens' or 'standard_library'"
        problems.append(Problem("rows", len(rows), problem, remedy))
    if problems:
        raise DataError(*problems)


def _refuse_existing(paths: dict[str, pathlib.Path]) -> None:
    """Refuses to replace indexes."""
    problems = [
        Problem(
            "output",
            str(path.parent),
            f"holds {path.name} already",
            "remove it, or name another folder",
        )
        for path in paths.values()
        if os.path.lexists(path)
    ]
    if problems:
        raise DataError(*problems)


@contextlib.contextmanager
def _output_errors(output: pathlib.Path) -> Iterator[None]:
    """Turns an OSError in the enclosed code into an error that names the output."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "name a folder that can be made, on a disk with room"
        raise DataError(Problem("output", str(output), problem, remedy)) from error


def _map(job: Job, kind: str, map_shards: MapShards, bar: progress.Progress) -> None:
    """Computes the shards that are not finished."""
    label = "Counting tokens" if kind == _COUNT else "Measuring samples"
    task = bar.add_task(label, total=len(job.rows))
    pending = []
    for shard in range(job.num_shards):
        if job.is_finished(kind, shard):
            bar.advance(task, len(job.span(shard)))
        else:
            pending.append(shard)
    for num_samples in map_shards(kind, pending):
        bar.advance(task, num_samples)


def _reduce(job: Job, paths: dict[str, pathlib.Path]) -> None:
    """Writes the indexes; needs memory for about 24 bytes per sample."""
    shards = [job.read(_MEASURE, shard) for shard in range(job.num_shards)]
    for column, (name, path) in enumerate(paths.items()):
        values = np.concatenate([shard[column] for shard in shards])
        write_index(path, name, values.astype(np.float64), job.digest)


@contextlib.contextmanager
def _start_processes(job: Job, num_processes: int) -> Iterator[MapShards]:
    """Yields a function that computes shards, here or in worker processes."""
    if num_processes == 1:
        # Lazy, so that the progress bar advances by shard.
        yield lambda kind, shards: (_compute(job, kind, shard) for shard in shards)
        return
    pool = futures.ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),  # JAX has threads, which fork would break
        initializer=_start_worker,
        initargs=(job,),
    )

    def map_shards(kind: str, shards: Sequence[int]) -> Iterator[int]:
        submitted = [pool.submit(_compute_in_worker, kind, shard) for shard in shards]
        for future in futures.as_completed(submitted):
            yield future.result()

    try:
        yield map_shards
    except BrokenProcessPool as error:
        problem = "lost a process, which was killed or could not start"
        remedy = "type the same command again: finished shards remain"
        raise ProcessError(
            Problem("num_processes", num_processes, problem, remedy)
        ) from error
    finally:
        # Without cancel_futures, an error would wait for all submitted shards.
        pool.shutdown(cancel_futures=True)


_worker_jobs: list[Job] = []
"""The job of this worker process."""


def _start_worker(job: Job) -> None:
    _worker_jobs.append(job)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports a Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Ends this process once the parent was killed; the pool would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # sys.exit would end this thread only.
    os._exit(1)


def _compute_in_worker(kind: str, shard: int) -> int:
    return _compute(_worker_jobs[0], kind, shard)


def _compute(job: Job, kind: str, shard: int) -> int:
    """Computes and writes a shard; returns the number of samples."""
    if kind == _COUNT:
        job.write(kind, shard, [_count(job, shard)])
    else:
        job.write(kind, shard, _measure(job, shard))
    return len(job.span(shard))


def _count(job: Job, shard: int) -> np.ndarray:
    """Counts each token id in the samples of a shard, int64[V]."""
    total = np.zeros(job.vocab_size, np.int64)
    for batch in _read_batches(job, shard):
        counts = np.bincount(batch.tokens[batch.is_token], minlength=job.vocab_size)
        if len(counts) > job.vocab_size:
            number = batch.numbers[(batch.tokens >= job.vocab_size).any(axis=1)][0]
            problem = f"in sample {number} is beyond the vocabulary of {job.vocab_size}"
            remedy = "prepare the data again"
            raise DataError(Problem("token", len(counts) - 1, problem, remedy))
        total += counts
    return total


def _measure(job: Job, shard: int) -> list[np.ndarray]:
    """Values of the samples of a shard, one float64[n] per metric."""
    counts = job.read(_TOTAL, 0)[0] if job.needs_counts else None
    length = job.rows.read(np.zeros(1, np.int64))["tokens"].shape[1]
    functions = [
        metrics.make_metric(
            name, length=length, vocab_size=job.vocab_size, counts=counts
        )
        for name in job.metrics
    ]
    batches = _read_batches(job, shard)
    values = [[function(batch) for function in functions] for batch in batches]
    return [np.concatenate(column) for column in zip(*values, strict=True)]


def _sum_counts(job: Job) -> np.ndarray:
    counts = (job.read(_COUNT, shard)[0] for shard in range(job.num_shards))
    return sum(counts, np.zeros(job.vocab_size, np.int64))


def _read_batches(job: Job, shard: int) -> Iterator[metrics.Batch]:
    """Reads the samples of a shard in batches."""
    span = job.span(shard)
    for start in range(span.start, span.stop, BATCH_ROWS):
        numbers = np.arange(start, min(start + BATCH_ROWS, span.stop))
        fields = job.rows.read(numbers)
        tokens = fields["tokens"]
        # Rows without segments have no padding.
        segments = fields.get("segment_ids", np.ones_like(tokens))
        yield metrics.Batch(numbers, tokens, segments != 0)
