"""Where the numbers of a run go: one protocol, a screen or file format behind each."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import pathlib
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from absl import logging

from zjax.config.schema import Config
from zjax.errors import ConfigError, Problem
from zjax.observe.directory import check_directory, writing
from zjax.observe.history import HISTORY, Table, read_csv, read_json_lines
from zjax.observe.progress import Progress
from zjax.packages import check_installed
from zjax.reading import read_text

_FLUSH_SECONDS = 10
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What sinks need."""


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Takes named values of one step; steps never go back."""

    def close(self) -> None:
        """Writes what is left and lets go of files."""


def make_sinks(
    config: Config, directory: str | os.PathLike[str], *, last_step: int = 0
) -> tuple[Sink, ...]:
    """Opens the sinks of a run.

    Args:
        config: The run; `observe.sinks` names the sinks.
        directory: Directory of the run; made if it is missing.
        last_step: Last step of the run that is continued: what the files hold of later
            steps is dropped. 0 starts anew.

    Returns:
        The sinks, in the order named; none in processes other than the first.

    Raises:
        ConfigError: If a sink needs a package that is not installed, or the directory
            cannot be used.
        OutputError: If a file cannot be written.
    """
    check_sinks(config)
    if jax.process_index() != 0:
        return ()
    check_directory(os.fspath(directory))
    root = pathlib.Path(directory)
    make = {
        "console": lambda: Progress(config.num_steps),
        "jsonl": lambda: JsonLines(root / HISTORY, last_step=last_step),
        "csv": lambda: Csv(root / "metrics.csv", last_step=last_step),
        "tensorboard": lambda: TensorBoard(root / "tensorboard", last_step=last_step),
        "wandb": lambda: WeightsAndBiases(config, root, last_step=last_step),
    }
    sinks: list[Sink] = []
    with contextlib.ExitStack() as opened:
        for name in config.observe.sinks:
            sinks.append(make[name]())
            opened.callback(sinks[-1].close)
        opened.pop_all()
    return tuple(sinks)


def check_sinks(config: Config) -> None:
    """Finds out before a run starts that a sink, or its picture, lacks its package.

    Args:
        config: The run; `observe` names the sinks and says whether there is a picture.

    Raises:
        ConfigError: If one needs a package that is not installed.

    Example:
        >>> check_sinks(Config())
    """
    sinks, said = config.observe.sinks, "needs a package that is not installed"
    problems = []
    for sink, package in _PACKAGES.items():
        if sink in sinks and importlib.util.find_spec(package) is None:
            remedy = f"pip install {package}, or leave it out"
            problems.append(Problem("observe.sinks", sink, said, remedy))
    is_drawn = config.observe.plot and "jsonl" in sinks
    if is_drawn and importlib.util.find_spec("matplotlib") is None:
        remedy = "pip install matplotlib, or set it to False"
        problems.append(Problem("observe.plot", True, said, remedy))
    if problems:
        raise ConfigError(*problems)


class JsonLines:
    """One JSON object a line, on disk as soon as it is written.

    Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity".

    Args:
        path: The file.
        last_step: Lines of later steps, and a line cut short, are dropped first; 0
            drops all. Where lines are damaged, a copy of the file is kept.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int = 0) -> None:
        self._path = path
        with writing(path):
            rows, num_damaged = read_json_lines(path) if last_step else ([], 0)
            _put_aside(path, num_damaged)
            kept = [row for row in rows if row["step"] <= last_step]
            _replace(path, "".join(map(_json_line, kept)))
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Appends a line."""
        with writing(self._path):
            self._file.write(_json_line({"step": step, **values}))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._file.close()


class Csv:
    """One table; a new label adds a column at the right.

    Args:
        path: The file.
        last_step: Rows of later steps are dropped first; 0 drops all. Where rows are
            damaged, a copy of the file is kept.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int = 0) -> None:
        self._path = path
        with writing(path):
            found = read_csv(path) if last_step else Table(["step"], [], 0)
            _put_aside(path, found.num_damaged)
            kept = [row for row in found.rows if int(row["step"]) <= last_step]
            self._columns = found.columns if kept else ["step"]
            self._rewrite(kept)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Appends a row; labels without a value stay empty."""
        new = [label for label in values if label not in self._columns]
        with writing(self._path):
            if new:
                self._file.close()
                self._columns += new
                self._rewrite(read_csv(self._path).rows)
            self._writer.writerow({"step": step, **values})
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._file.close()

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _replace(self._path, table.getvalue())
        self._file = self._path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")


class TensorBoard:
    """Event files for TensorBoard, on disk every ten seconds.

    Written without a thread: one that dies of a full disk would leave the run waiting.

    Args:
        directory: Where the event files go.
        last_step: Later steps of earlier files are hidden; 0 hides all.
    """

    def __init__(self, directory: pathlib.Path, *, last_step: int = 0) -> None:
        check_installed("tensorboardX")
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        self._events: Any = event_pb2  # its classes are made when it is imported
        self._scalar = scalar
        first = last_step + 1 if last_step else 0
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{first}"
        self._directory = directory
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter(str(directory / name))
            self._add(step=first, file_version="brain.Event:2")
            log = self._events.SessionLog
            self._add(step=first, session_log=log(status=log.START))
        self._flushed = -math.inf

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds one point to each label's curve."""
        with writing(self._directory):
            for label, value in values.items():
                self._add(step=step, summary=self._scalar(label, value))
            if time.monotonic() > self._flushed + _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left."""
        with writing(self._directory):
            self._file.close()

    def _add(self, **said: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **said)
        self._file.write(event.SerializeToString())


class WeightsAndBiases:
    """A run of Weights & Biases; the package is imported only here.

    Args:
        config: Settings shown beside the run.
        directory: Directory of the run; its name is the run's name.
        last_step: 0 starts a new run; otherwise the run of this directory goes on.
    """

    def __init__(
        self, config: Config, directory: pathlib.Path, *, last_step: int = 0
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        identity = directory / "wandb_id.txt"
        with writing(identity):
            if not last_step or not identity.exists():
                identity.write_text(uuid.uuid4().hex)
            known = _identity(identity)
        self._run = wandb.init(
            project="zjax",
            name=directory.name,
            id=known,
            resume="allow",
            dir=str(directory),
            config=dataclasses.asdict(config),
        )

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Logs the values at a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _json_line(row: Mapping[str, int | float]) -> str:
    spell = {math.inf: "Infinity", -math.inf: "-Infinity"}
    finite = {
        name: x if math.isfinite(x) else spell.get(x, "NaN") for name, x in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _identity(path: pathlib.Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        problem, remedy = f"cannot go on ({path.name}: {error})", "remove that file"
        raise ConfigError(Problem("observe.sinks", "wandb", problem, remedy)) from error


def _put_aside(path: pathlib.Path, num_damaged: int) -> None:
    """Keeps a file of which not all can be read as it is, before it is rewritten."""
    if num_damaged:
        copy = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, copy)
        said = "%s: %d lines cannot be read; the file as it was is %s"
        logging.warning(said, path, num_damaged, copy.name)


def _replace(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)
