"""Sinks that are services: Weights & Biases, and MLflow."""

import contextlib
import dataclasses
import pathlib
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from zjax.config.convert import to_mapping
from zjax.config.schema import Config
from zjax.errors import ConfigError, OutputError, Problem
from zjax.observe.directory import writing
from zjax.observe.metrics import Value, scalars
from zjax.reading import read_text

_MAX_PARAMS = 100
"""Parameters that MLflow takes in one call."""
_MAX_LETTERS = 500
"""Letters of a parameter's value that every MLflow server takes."""


class WeightsAndBiases:
    """A run of Weights & Biases; the package is imported only here.

    `WANDB_MODE=offline` writes into the directory, for `wandb sync`.

    Args:
        config: Settings shown with the run; `observe.project` names its project.
        directory: Directory of the run, which names it.
        last_step: 0 starts a new run; otherwise the run of this directory continues.

    Raises:
        OutputError: Weights & Biases refuses the run, or does not answer.
    """

    def __init__(
        self, config: Config, directory: pathlib.Path, *, last_step: int = 0
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        path = directory / "wandb_id.txt"
        known = _read_id(path, "wandb") if last_step else ""
        if not known:
            known = uuid.uuid4().hex
            _write_id(path, known)
        with _reaching("wandb", wandb.errors.Error, "WANDB_MODE and the API key"):
            self._run = wandb.init(
                project=config.observe.project,
                name=directory.name,
                id=known,
                resume="allow",
                dir=str(directory),
                config=dataclasses.asdict(config),
            )

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs the values at a step."""
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow; the package is imported only here.

    `MLFLOW_TRACKING_URI` names the server or the database.

    Args:
        config: Settings, the parameters of a new run; `observe.project` names its
            experiment.
        directory: Directory of the run, which names it.
        last_step: 0 starts a new run; otherwise the run of this directory continues.

    Raises:
        OutputError: MLflow refuses the run, or its server does not answer.
    """

    def __init__(
        self, config: Config, directory: pathlib.Path, *, last_step: int = 0
    ) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        path = directory / "mlflow_id.txt"
        known = _read_id(path, "mlflow") if last_step else ""
        with self._reaching():
            self._client = mlflow.MlflowClient()
            self._run_id = known or self._start(config, directory.name)
            self._client.update_run(self._run_id, status="RUNNING")
        if not known:
            _write_id(path, self._run_id)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs the values at a step."""
        now, metric = int(time.time() * 1_000), self._mlflow.entities.Metric
        metrics = [metric(n, x, now, step) for n, x in scalars(values).items()]
        with self._reaching():
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Ends the run."""
        with self._reaching():
            self._client.set_terminated(self._run_id)

    def _start(self, config: Config, name: str) -> str:
        """Makes a run with the settings as parameters; returns its identity."""
        client, project = self._client, config.observe.project
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        known = client.create_run(experiment, run_name=name).info.run_id
        param = self._mlflow.entities.Param
        params = [param(n, x[:_MAX_LETTERS]) for n, x in _flatten(to_mapping(config))]
        for first in range(0, len(params), _MAX_PARAMS):
            client.log_batch(known, params=params[first : first + _MAX_PARAMS])
        return known

    def _reaching(self) -> contextlib.AbstractContextManager[None]:
        kind = self._mlflow.exceptions.MlflowException
        return _reaching("mlflow", kind, "MLFLOW_TRACKING_URI")


@contextlib.contextmanager
def _reaching(sink: str, kind: type[Exception], setting: str) -> Iterator[None]:
    """Raises an error of a service as an `OutputError`."""
    try:
        yield
    except kind as error:
        problem = f"cannot be written to ({str(error).partition(chr(10))[0]})"
        remedy = f"look at {setting}, or leave it out"
        raise OutputError(Problem("observe.sinks", sink, problem, remedy)) from error


def _flatten(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", str(value)


def _read_id(path: pathlib.Path, sink: str) -> str:
    """The identity of the directory's run; empty if it has none."""
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
