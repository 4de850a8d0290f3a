"""Destinations of metrics: one protocol for console, files and services."""

import contextlib
import csv
import importlib.util
import io
import math
import os
import pathlib
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from absl import logging

from zjax.errors import ConfigError, Problem, check_installed
from zjax.files import read_text, writing
from zjax.observe import history
from zjax.observe.delivery import CLOSE_SECONDS, Delivery
from zjax.observe.metrics import Value, scalars
from zjax.observe.progress import Progress
from zjax.settings.schema import Observe

_FLUSH_SECONDS = 10
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


@runtime_checkable
class Sink(Protocol):
    """Receives the metrics of a step; a sink for numbers ignores arrays."""

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Writes the values of one step; steps never decrease."""

    def close(self) -> None:
        """Flushes and closes files."""


def make_sinks(
    observe: Observe,
    directory: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    num_steps: int,
    last_step: int = 0,
) -> tuple[Sink, ...]:
    """Opens the sinks of a run, in the order named; none but on process 0.

    Services show the nested `settings` of the run. Files of a continued run lose
    entries of steps after `last_step`; 0 starts a new run. One `Delivery`, the last
    sink, serves all services.
    """
    check_sinks(observe)
    if jax.process_index() != 0:
        return ()
    history.check_directory(os.fspath(directory))
    root = pathlib.Path(directory)
    make = {
        "console": lambda: Progress(num_steps),
        "jsonl": lambda: JsonLines(root / history.HISTORY, last_step=last_step),
        "csv": lambda: Csv(root / "metrics.csv", last_step=last_step),
        "tensorboard": lambda: TensorBoard(root / "tensorboard", last_step=last_step),
    }
    services = {"wandb": WeightsAndBiases, "mlflow": MLflow}
    named = [services[x] for x in observe.sinks if x in services]
    sinks: list[Sink] = []
    # If one sink cannot be opened, the sinks before are closed.
    with contextlib.ExitStack() as opened:
        for name in observe.sinks:
            if name in make:
                sinks.append(make[name]())
                opened.callback(sinks[-1].close)
        if named:
            trackers = [
                service(observe.project, settings, root, last_step=last_step)
                for service in named
            ]
            sinks.append(Delivery(trackers, root, last_step=last_step))
        opened.pop_all()
    return tuple(sinks)


def check_sinks(observe: Observe) -> None:
    """Checks that the packages of the sinks and of the plot are installed."""
    sinks, problem = observe.sinks, "needs a package that is not installed"
    problems = []
    for sink, package in _PACKAGES.items():
        if sink in sinks and importlib.util.find_spec(package) is None:
            remedy = f"pip install {package}, or leave it out"
            problems.append(Problem("observe.sinks", sink, problem, remedy))
    is_drawn = observe.plot and "jsonl" in sinks
    if is_drawn and importlib.util.find_spec("matplotlib") is None:
        remedy = "pip install matplotlib, or set it to False"
        problems.append(Problem("observe.plot", True, problem, remedy))
    if problems:
        raise ConfigError(*problems)


class JsonLines:
    """Writes one JSON object per line, flushed at once.

    Numbers that JSON lacks are written as "NaN", "Infinity" and "-Infinity", arrays as
    nested lists.

    Args:
        path: JSON lines file; a copy is kept if lines are damaged.
        last_step: Lines of later steps are dropped first; 0 drops all.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int = 0) -> None:
        self._path = path
        with writing(path):
            rows, num_damaged = history.read_json_lines(path) if last_step else ([], 0)
            _back_up(path, num_damaged)
            earlier = [row for row in rows if scalars(row)["step"] <= last_step]
            history.replace_text(path, "".join(map(history.json_line, earlier)))
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a line."""
        with writing(self._path):
            self._file.write(history.json_line({"step": step, **values}))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._file.close()


class Csv:
    """Writes one table; a new label adds a column at the right.

    Args:
        path: CSV file; a copy is kept if rows are damaged.
        last_step: Rows of later steps are dropped first; 0 drops all.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int = 0) -> None:
        self._path = path
        with writing(path):
            found = (
                history.read_csv(path) if last_step else history.Table(["step"], [], 0)
            )
            _back_up(path, found.num_damaged)
            earlier = [row for row in found.rows if int(row["step"]) <= last_step]
            self._columns = found.columns if earlier else ["step"]
            self._rewrite(earlier)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a row; labels without a value stay empty."""
        values = scalars(values)
        new = [label for label in values if label not in self._columns]
        with writing(self._path):
            if new:
                # A new column changes the header, so the file is written anew.
                self._file.close()
                self._columns += new
                self._rewrite(history.read_csv(self._path).rows)
            self._writer.writerow({"step": step, **values})
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._file.close()

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Replaces the file by a table of the rows, and opens it for appending."""
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        history.replace_text(self._path, table.getvalue())
        self._file = self._path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")


class TensorBoard:
    """Writes event files for TensorBoard, flushed every ten seconds.

    There is no writer thread: on a full disk the thread would die and block the run.

    Args:
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
            # Readers expect the version in the first event.
            self._add(step=first, file_version="brain.Event:2")
            log = self._events.SessionLog
            # The start of a session hides later steps in earlier files.
            self._add(step=first, session_log=log(status=log.START))
        self._flushed = -math.inf  # flushes at the first write

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds one point to each label's curve."""
        with writing(self._directory):
            for label, value in scalars(values).items():
                self._add(step=step, summary=self._scalar(label, value))
            if time.monotonic() > self._flushed + _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        with writing(self._directory):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


def _back_up(path: pathlib.Path, num_damaged: int) -> None:
    """Copies a file with unreadable lines before it is rewritten."""
    if num_damaged:
        copy = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, copy)
        message = "%s: %d lines cannot be read; a copy of the file is %s"
        logging.warning(message, path, num_damaged, copy.name)


_MAX_PARAMS = 100
"""Parameters that MLflow takes in one call."""
_MAX_LETTERS = 500
"""Letters of a parameter's value that every MLflow server takes."""


class _Service:
    """Run of a tracking service, whose identity is kept in the directory of the run.

    Args:
        shown: Nested settings that are shown with the run.
        last_step: 0 starts a new run; otherwise the run in `directory` continues.

    Raises:
        ConfigError: The file with the identity of the run is damaged.
    """

    name = ""

    def __init__(
        self,
        project: str,
        shown: Mapping[str, Any],
        directory: pathlib.Path,
        *,
        last_step: int = 0,
    ) -> None:
        self._project, self._shown, self._directory = project, shown, directory
        self._path = directory / f"{self.name}_id.txt"
        self._known = _read_id(self._path, self.name) if last_step else ""


class WeightsAndBiases(_Service):
    """Run of Weights & Biases; the package is imported only here.

    `WANDB_MODE=offline` writes into the directory, for `wandb sync`. Curves are drawn
    over the metric `step`, since the service drops rows when the built-in count of
    steps decreases, as after a return to an earlier checkpoint.
    """

    name, settings = "wandb", "WANDB_MODE and the API key"
    _run: Any = None

    def open(self) -> None:
        """Starts or continues the run."""
        import wandb  # pyright: ignore[reportMissingImports]

        # The package waits at the exit of the program, by default without end.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(CLOSE_SECONDS))
        if not self._known:
            self._known = uuid.uuid4().hex
            # Before `init`, so that the next start finds a run that crashed there.
            _write_id(self._path, self._known)
        self._run = wandb.init(
            project=self._project,
            name=self._directory.name,
            id=self._known,
            resume="allow",
            dir=str(self._directory),
            config=dict(self._shown),
        )
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()

    def sync_command(self) -> str:
        """Command that uploads data which the package has written to disk."""
        return f"wandb sync {self._directory / 'wandb'}/*run-*-{self._known}"


class MLflow(_Service):
    """Run of MLflow; the package is imported only here.

    `MLFLOW_TRACKING_URI` names the server or the database.
    """

    name, settings = "mlflow", "MLFLOW_TRACKING_URI"
    _client: Any = None
    _metric: Any = None

    def open(self) -> None:
        """Starts or continues the run."""
        import mlflow  # pyright: ignore[reportMissingImports]

        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if self._known:
            self._client.update_run(self._known, status="RUNNING")
        else:
            self._known = self._start(mlflow.entities.Param)
            _write_id(self._path, self._known)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        # MLflow takes milliseconds.
        now = int(time.time() * 1_000)
        metrics = [self._metric(name, x, now, step) for name, x in values.items()]
        self._client.log_batch(self._known, metrics=metrics)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._known)

    def sync_command(self) -> str:
        """Returns "", since the package keeps no metrics on disk."""
        return ""

    def _start(self, param: Any) -> str:
        """Makes a run with the settings as parameters; returns the id."""
        client, project = self._client, self._project
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        run = client.create_run(experiment, run_name=self._directory.name)
        settings = _flatten(self._shown)
        params = [param(name, text[:_MAX_LETTERS]) for name, text in settings]
        for first in range(0, len(params), _MAX_PARAMS):
            batch = params[first : first + _MAX_PARAMS]
            client.log_batch(run.info.run_id, params=batch)
        return run.info.run_id


def _flatten(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields path and text of each setting."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", str(value)


def _read_id(path: pathlib.Path, sink: str) -> str:
    """Id of the directory's run; empty if the directory has none."""
    with writing(path):
        if not path.exists():
            return ""
        try:
            return read_text(path)
        except ValueError as error:
            problem = f"cannot resume ({path.name}: {error})"
            remedy = "remove that file"
            raise ConfigError(
                Problem("observe.sinks", sink, problem, remedy)
            ) from error


def _write_id(path: pathlib.Path, identity: str) -> None:
    with writing(path):
        path.write_text(identity)
