"""Sinks that are services: Weights & Biases, and MLflow."""

import dataclasses
import os
import pathlib
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from zjax.config.convert import to_mapping
from zjax.config.schema import Config
from zjax.errors import ConfigError, Problem
from zjax.observe.delivery import CLOSE_SECONDS
from zjax.observe.directory import writing
from zjax.reading import read_text

_MAX_PARAMS = 100
"""Parameters that MLflow takes in one call."""
_MAX_LETTERS = 500
"""Letters of a parameter's value that every MLflow server takes."""


class WeightsAndBiases:
    """A run of Weights & Biases; the package is imported only here.

    `WANDB_MODE=offline` writes into the directory, for `wandb sync`. Curves are drawn
    over the metric `step`: the service drops rows whose own count of steps decreases,
    as it would after a return to an earlier checkpoint.

    Args:
        config: Settings shown with the run; `observe.project` names its project.
        directory: Directory of the run, which names it.
        last_step: 0 starts a new run; otherwise the run of this directory continues.

    Raises:
        ConfigError: The file with the identity of the run is damaged.
    """

    name, settings = "wandb", "WANDB_MODE and the API key"

    def __init__(
        self, config: Config, directory: pathlib.Path, *, last_step: int = 0
    ) -> None:
        self._config, self._directory = config, directory
        self._path = directory / "wandb_id.txt"
        self._known = _read_id(self._path, "wandb") if last_step else ""
        self._run: Any = None

    def open(self) -> None:
        """Starts or continues the run."""
        import wandb  # pyright: ignore[reportMissingImports]

        # The package waits at the exit of the program, by default without end.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(CLOSE_SECONDS))
        if not self._known:
            self._known = uuid.uuid4().hex
            _write_id(self._path, self._known)
        self._run = wandb.init(
            project=self._config.observe.project,
            name=self._directory.name,
            id=self._known,
            resume="allow",
            dir=str(self._directory),
            config=dataclasses.asdict(self._config),
        )
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()

    def sync_command(self) -> str:
        """The command that uploads what the package has written to disk."""
        return f"wandb sync {self._directory / 'wandb'}/*run-*-{self._known}"


class MLflow:
    """A run of MLflow; the package is imported only here.

    `MLFLOW_TRACKING_URI` names the server or the database.

    Args:
        config: Settings, the parameters of a new run; `observe.project` names its
            experiment.
        directory: Directory of the run, which names it.
        last_step: 0 starts a new run; otherwise the run of this directory continues.

    Raises:
        ConfigError: The file with the identity of the run is damaged.
    """

    name, settings = "mlflow", "MLFLOW_TRACKING_URI"

    def __init__(
        self, config: Config, directory: pathlib.Path, *, last_step: int = 0
    ) -> None:
        self._config, self._directory = config, directory
        self._path = directory / "mlflow_id.txt"
        self._run_id = _read_id(self._path, "mlflow") if last_step else ""
        self._client: Any = None
        self._metric: Any = None

    def open(self) -> None:
        """Starts or continues the run."""
        import mlflow  # pyright: ignore[reportMissingImports]

        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._start(mlflow.entities.Param)
            _write_id(self._path, self._run_id)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        now = int(time.time() * 1_000)
        metrics = [self._metric(name, x, now, step) for name, x in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id)

    def sync_command(self) -> str:
        """Nothing: the package keeps no metrics."""
        return ""

    def _start(self, param: Any) -> str:
        """Makes a run with the settings as parameters; returns its identity."""
        client, project = self._client, self._config.observe.project
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        run = client.create_run(experiment, run_name=self._directory.name)
        settings = _flatten(to_mapping(self._config))
        params = [param(name, text[:_MAX_LETTERS]) for name, text in settings]
        for first in range(0, len(params), _MAX_PARAMS):
            batch = params[first : first + _MAX_PARAMS]
            client.log_batch(run.info.run_id, params=batch)
        return run.info.run_id


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
