"""Services get the metrics of a run; what refuses them is named."""

import importlib.util
import math
import os
import sys
import threading
import types

import pytest

from tests.support.refusals import config_error, output_error
from zjax.config import load_config
from zjax.errors import OutputError
from zjax.observe import check_sinks, make_sinks
from zjax.settings import schema
from zjax.settings.mappings import to_mapping

SERVICES = ("wandb", "mlflow")
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in SERVICES}


def needs(name):
    return pytest.mark.skipif(not INSTALLED[name], reason=f"needs pip install {name}")


def open_sinks(name, directory, last_step=0, **observe):
    config = load_config({"observe": {"sinks": (name,), **observe}})
    settings = to_mapping(config)
    return make_sinks(
        config.observe, directory, settings, num_steps=1_000, last_step=last_step
    )


def write(name, directory, rows, last_step=0, **observe):
    (sink,) = open_sinks(name, directory, last_step, **observe)
    for step, values in rows:
        sink.write(step, values)
    sink.close()


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_found_in_every_process(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    for process in (0, 1):
        monkeypatch.setattr("jax.process_index", lambda process=process: process)
        checks = (
            lambda: check_sinks(schema.Observe(sinks=(name,))),
            lambda: open_sinks(name, tmp_path),
        )
        for check in checks:
            with config_error(
                f"observe.sinks='{name}' needs a package that is not installed; "
                f"pip install {name}, or leave it out"
            ):
                check()


class Refused(Exception):
    """The error of both packages."""


@pytest.fixture
def fake_wandb(monkeypatch):
    """Arguments of the calls, in order; a project named `locked` is refused."""
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=lambda values: calls.append(values),
        finish=lambda: calls.append("finish"),
    )

    def init(**settings):
        if settings["project"] == "locked":
            raise Refused("no key\nand more")
        calls.append(settings)
        return run

    module = types.SimpleNamespace(
        init=init, __spec__="found", errors=types.SimpleNamespace(Error=Refused)
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_continues_the_run_of_the_directory(tmp_path, fake_wandb):
    write("wandb", tmp_path, [(1, {"loss": 2.5, "load": [1]})], project="mine")
    write("wandb", tmp_path, [], last_step=1)
    write("wandb", tmp_path, [])
    first, axis, logged, finish, second, _, _, third, *_ = fake_wandb
    assert (axis, finish) == (("*", "step"), "finish")
    assert logged == {"step": 1, "loss": 2.5}  # with no count of wandb's own
    assert (first["project"], second["project"]) == ("mine", "zjax")
    assert (first["name"], first["dir"]) == (tmp_path.name, str(tmp_path))
    assert first["config"]["zero"]["stage"] == 1
    assert first["id"] == second["id"] != third["id"]


def test_what_wandb_refuses_and_a_damaged_identity_are_told(tmp_path, fake_wandb):
    with output_error(
        "observe.sinks='wandb' cannot be written to (no key); look at WANDB_MODE and "
        "the API key, or leave it out"
    ):
        write("wandb", tmp_path, [], project="locked")
    (tmp_path / "wandb_id.txt").write_bytes(b"\xff")
    with config_error(
        "observe.sinks='wandb' cannot resume (wandb_id.txt: it is not UTF-8 text); "
        "remove that file"
    ):
        write("wandb", tmp_path, [], last_step=1)


class FakeMLflow:
    """Stands in for a server: experiments by name, and what each run was given."""

    def __init__(self):
        self.experiments, self.runs = {}, {}

    def get_experiment_by_name(self, name):
        known = self.experiments.get(name)
        return known and types.SimpleNamespace(experiment_id=known)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, f"experiment of {name}")

    def create_run(self, experiment, run_name):
        known = str(len(self.runs))
        self.runs[known] = {"of": (experiment, run_name), "params": {}, "metrics": []}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=known))

    def log_batch(self, run, params=(), metrics=()):
        assert len(params) <= 100
        if any(math.isnan(value) for _, value, _, _ in metrics):
            raise Refused("no such number\nand more")
        self.runs[run]["params"] |= dict(params)
        self.runs[run]["metrics"] += [(n, x, step) for n, x, _, step in metrics]

    def update_run(self, run, status):
        self.runs[run]["status"] = status

    def set_terminated(self, run):
        self.runs[run]["status"] = "FINISHED"


@pytest.fixture
def fake_mlflow(monkeypatch):
    server = FakeMLflow()
    module = types.SimpleNamespace(
        MlflowClient=lambda: server,
        __spec__="found",
        entities=types.SimpleNamespace(
            Param=lambda name, value: (name, value),
            Metric=lambda name, value, time, step: (name, value, time, step),
        ),
        exceptions=types.SimpleNamespace(MlflowException=Refused),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return server


def test_mlflow_continues_the_run_of_the_directory(tmp_path, fake_mlflow):
    """Fails if a continued run is another, or a new one goes on with the old."""
    write("mlflow", tmp_path, [(1, {"loss": 2.5, "load": [1]})], project="mine")
    write("mlflow", tmp_path, [(2, {"loss": 2.0})], last_step=1, project="mine")
    write("mlflow", tmp_path, [], project="mine")
    first, second = fake_mlflow.runs.values()
    assert first["of"] == ("experiment of mine", tmp_path.name)
    assert first["metrics"] == [("loss", 2.5, 1), ("loss", 2.0, 2)]
    assert first["params"]["zero.stage"] == "1"
    assert first["params"]["observe.sinks"] == "('mlflow',)"
    assert len(first["params"]) > 100
    assert first["status"] == "FINISHED"
    assert second["metrics"] == []


def unsent(directory, name="mlflow"):
    path = directory / f"{name}_unsent.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_what_mlflow_refuses_is_kept_and_sent_later(tmp_path, fake_mlflow, caplog):
    """Fails if a refusal ends the run, is lost or untold, or later rows wait for it."""
    path = tmp_path / "mlflow_unsent.jsonl"
    nan, fine = (1, {"loss": math.nan}), (2, {"loss": 2.0})
    write("mlflow", tmp_path, [nan, nan, fine])
    assert caplog.messages == [
        "observe.sinks='mlflow' cannot be written to (no such number); look at "
        f"MLFLOW_TRACKING_URI; the run goes on, and {path} keeps what is not sent",
        f"observe.sinks='mlflow' has not taken 2 rows of metrics ({path}); run the "
        "same command again to send them",
    ]
    (run,) = fake_mlflow.runs.values()
    assert (run["metrics"], run["status"]) == ([("loss", 2.0, 2)], "FINISHED")
    kept = '{"step": 1, "loss": "NaN"}'
    assert unsent(tmp_path) == [kept, kept]
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 9, "loss": 1.0}\n')
    write("mlflow", tmp_path, [], last_step=2)
    assert run["metrics"][1:] == [("loss", 3.0, 1)]  # step 9 is taken again
    assert unsent(tmp_path) == []


@pytest.fixture
def hanging(fake_mlflow, monkeypatch):
    """Lets the server answer no more, until the event that it returns is set."""
    answers, log = threading.Event(), fake_mlflow.log_batch

    def log_batch(run, params=(), metrics=()):
        if metrics:
            answers.wait()
        log(run, params, metrics)

    monkeypatch.setattr(fake_mlflow, "log_batch", log_batch)
    yield answers
    answers.set()


def test_no_step_waits_for_a_server_that_hangs(tmp_path, hanging, caplog, monkeypatch):
    """Fails if a step or the end waits for ever, or a row of any step is lost."""
    monkeypatch.setattr("zjax.observe.delivery.MAX_PENDING", 2)
    monkeypatch.setattr("zjax.observe.delivery.CLOSE_SECONDS", 0.01)
    write("mlflow", tmp_path, [(n, {"loss": 2.0}) for n in range(5)])
    path = tmp_path / "mlflow_unsent.jsonl"
    assert caplog.messages == [
        "observe.sinks='mlflow' is slow to answer (2 rows wait); look at "
        f"MLFLOW_TRACKING_URI; the run goes on, and {path} keeps what is not sent",
        f"observe.sinks='mlflow' has not taken 5 rows of metrics ({path}); run the "
        "same command again to send them",
    ]
    assert sorted(unsent(tmp_path)) == [
        f'{{"step": {n}, "loss": 2.0}}' for n in range(5)
    ]


def test_a_run_starts_without_a_server_that_hangs(tmp_path, fake_mlflow, monkeypatch):
    """Fails if the start waits for ever, or what was logged meanwhile is not sent."""
    answers, create = threading.Event(), fake_mlflow.create_run

    def create_run(*words, **named):
        answers.wait()
        return create(*words, **named)

    monkeypatch.setattr(fake_mlflow, "create_run", create_run)
    monkeypatch.setattr("zjax.observe.delivery.OPEN_SECONDS", 0.01)
    (sink,) = open_sinks("mlflow", tmp_path)
    sink.write(1, {"loss": 2.5})
    answers.set()
    sink.close()
    assert fake_mlflow.runs["0"]["metrics"] == [("loss", 2.5, 1)]


def test_a_core_of_wandb_that_died_ends_no_run(tmp_path, fake_wandb, caplog):
    """Fails if an error of a kind that no package documents ends the run."""
    (sink,) = open_sinks("wandb", tmp_path)
    sys.modules["wandb"].init(project="").log = lambda values: 1 / 0
    sink.write(1, {"loss": 2.5})
    sink.close()
    known = (tmp_path / "wandb_id.txt").read_text()
    path = tmp_path / "wandb_unsent.jsonl"
    assert caplog.messages[1] == (
        f"observe.sinks='wandb' has not taken 1 rows of metrics ({path}); run the same "
        f"command again to send them, and `wandb sync {tmp_path}/wandb/*run-*-{known}` "
        "sends what the package itself holds"
    )
    assert unsent(tmp_path, "wandb") == ['{"step": 1, "loss": 2.5}']


@pytest.mark.parametrize("error", [SystemExit(3), Refused("no disk\nand more")])
def test_no_error_of_a_service_loses_a_row_or_is_silent(
    tmp_path, fake_wandb, caplog, error
):
    """Fails if `SystemExit` ends the thread, or the end of a run fails unheard."""

    def fail(*values):
        raise error

    (sink,) = open_sinks("wandb", tmp_path)
    run = sys.modules["wandb"].init(project="")
    run.log = run.finish = fail
    sink.write(1, {"loss": 2.5})
    sink.close()
    assert unsent(tmp_path, "wandb") == ['{"step": 1, "loss": 2.5}']
    reason = "3" if isinstance(error, SystemExit) else "no disk"
    for problem in ("cannot be written to", "has not ended its run"):
        start = f"observe.sinks='wandb' {problem} ({reason}); look at "
        assert any(each.startswith(start) for each in caplog.messages)


@needs("wandb")
def test_wandb_itself_writes_a_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    write("wandb", tmp_path, [(1, {"loss": math.nan})], project="mine")
    known = (tmp_path / "wandb_id.txt").read_text()
    assert [*(tmp_path / "wandb").glob(f"offline-run-*-{known}")]


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # of the package itself
def test_mlflow_itself_has_the_metrics_of_both_starts(tmp_path, monkeypatch):
    import mlflow  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    write("mlflow", tmp_path, [(1, {"loss": 2.5})], project="mine")
    write("mlflow", tmp_path, [(2, {"loss": math.nan})], last_step=1, project="mine")
    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([found.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, str(point.value)) for point in history] == [
        (1, "2.5"),
        (2, "nan"),
    ]
    assert run.data.params["zero.stage"] == "1"
    assert run.info.status == "FINISHED"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{os.fspath(tmp_path)}/none")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(OutputError, match="'mlflow' cannot be written"):
        write("mlflow", tmp_path, [])
