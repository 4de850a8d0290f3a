"""A run tells its numbers late but in order, and what ends it is what is raised."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from tests.observe.disk import full_disk, open_files
from tests.support import models
from zjax.config import load_config
from zjax.errors import NonFiniteError, OutputError
from zjax.estimate.traced import run_flops
from zjax.models.build import make_model
from zjax.models.flops import flops_per_token
from zjax.observe import read_history
from zjax.observe.history import HISTORY
from zjax.observe.metrics import Throughput
from zjax.run import monitor as monitors
from zjax.run.monitor import Monitor, make_throughput
from zjax.schedule.training import TrainingSchedule

BATCH = {"x": jnp.zeros((2, 3))}


def make_monitor(
    directory,
    *,
    sinks=("jsonl",),
    callbacks=(),
    log_every_steps=1,
    precision=None,
    **given,
):
    observe = {"sinks": sinks, "log_every_steps": log_every_steps}
    settings = {"directory": str(directory), "num_steps": 100, "observe": observe}
    config = load_config(settings | {"precision": precision or {}})
    return Monitor(
        config,
        models.make_mlp(),
        schedule=TrainingSchedule(config),
        last_step=0,
        num_skipped=0,
        has_tokens=False,
        num_devices=1,
        callbacks=callbacks,
        **given,
    )


def take(monitor, step, *, loss=2.0, num_skipped=0, **values):
    numbers = {"loss": loss, "grad_norm": 1.0, "skipped_steps": num_skipped} | values
    metrics = {name: jnp.asarray(x, "float32") for name, x in numbers.items()}
    with monitor.step(step, (), BATCH) as given:
        given.append(metrics)


@pytest.fixture
def told():
    """The list that `tell_to` fills."""
    return []


@pytest.fixture
def tell_to(told):
    return lambda step, values: told.append((step, values["loss"]))


def test_numbers_are_told_one_step_late_and_in_order(tmp_path, told, tell_to):
    with make_monitor(tmp_path, callbacks=[tell_to]) as monitor:
        monitor.log(1, {})  # nothing is told of no values
        take(monitor, 1, loss=3.0)
        assert told == []
        take(monitor, 2, loss=2.0)
        assert told == [(1, 3.0)]
        take(monitor, 3, loss=1.0)
        with monitor.pause():
            assert told == [(1, 3.0), (2, 2.0), (3, 1.0)]
        with monitor.pause():
            assert len(told) == 3
    rows = read_history(tmp_path / HISTORY)
    assert [(row["step"], row["loss"]) for row in rows] == told


def test_only_due_and_newly_skipped_steps_and_the_last_are_told(
    tmp_path, told, tell_to
):
    skipped = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
    arguments = {"callbacks": [tell_to], "log_every_steps": 4}
    skip = {"on_nonfinite": "skip"}
    with make_monitor(tmp_path, precision=skip, **arguments) as monitor:
        for step, number in skipped.items():
            take(monitor, step, num_skipped=number)
        take(monitor, 99, num_skipped=2)
        take(monitor, 100, num_skipped=2)
        with monitor.pause():
            pass
    assert [step for step, _ in told] == [2, 4, 5, 100]


def test_every_callback_is_called_after_the_sinks(tmp_path):
    seen = []

    def first(step, values):
        seen.append((read_history(tmp_path / HISTORY)[-1]["step"], step))

    def second(step, values):
        seen.append(dict(values))

    with make_monitor(tmp_path, callbacks=[first, second]) as monitor:
        monitor.log(3, {"eval_loss": 1.5})
    assert seen == [(3, 3), {"eval_loss": 1.5}]


@pytest.mark.parametrize(
    ("values", "precision", "text"),
    [
        (
            {"loss": math.nan},
            {"on_nonfinite": "stop"},
            "loss=nan is not finite at step 1, whose update was not applied; lower "
            "optimizer.peak_learning_rate or look at the data",
        ),
        (
            {"grad_norm": math.inf},
            {"on_nonfinite": "stop"},
            "grad_norm=inf is not finite at step 1, whose update was not applied; "
            "lower optimizer.peak_learning_rate or look at the data",
        ),
        (
            {"grad_norm": math.inf, "loss_scale_spent": 1.0},
            {"compute_dtype": "float16", "on_nonfinite": "skip"},
            "precision.loss_scale.minimum=1.0 is the minimum and step 1 still "
            "overflows; use precision.compute_dtype='bfloat16' or a lower learning "
            "rate",
        ),
    ],
)
def test_a_step_that_ends_the_run_says_why(
    values, precision, text, tmp_path, told, tell_to
):
    settings = {"precision": precision, "callbacks": [tell_to]}
    with make_monitor(tmp_path, **settings) as monitor:
        take(monitor, 1, num_skipped=1, **values)
        with pytest.raises(NonFiniteError) as error:
            take(monitor, 2, num_skipped=1)
    assert str(error.value) == text
    assert [step for step, _ in told] == [1]


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (
            {"on_nonfinite": "stop"},
            "critic_grad_norm=nan is not finite at step 1, whose update was not "
            "applied; lower optimizer.peak_learning_rate or look at the data",
        ),
        (
            {"max_skipped_in_a_row": 2},
            "precision.on_nonfinite='skip' skipped 2 steps in a row, starting with "
            "critic_grad_norm=nan at step 1; lower optimizer.peak_learning_rate or "
            "look at the data; earlier checkpoints are unaffected",
        ),
    ],
    ids=["stop", "skip"],
)
def test_a_model_that_learns_beside_the_model_ends_the_run_too(
    precision, text, tmp_path
):
    """Fails if a critic may skip every step while the policy learns."""
    with make_monitor(tmp_path, precision=precision, beside={"critic_": 3}) as monitor:
        with pytest.raises(NonFiniteError) as error:
            for step in (1, 2, 3):
                number = {"critic_skipped_steps": 3 + step}
                take(monitor, step, critic_grad_norm=math.nan, **number)
        assert monitor.skipped_in_a_row > 0
    assert str(error.value) == text


def test_a_pause_is_not_time_of_steps(tmp_path, monkeypatch):
    now, seen = [0.0], []
    timer = functools.partial(Throughput, clock=lambda: now[0])
    monkeypatch.setattr(monitors, "Throughput", timer)
    callbacks = [lambda step, values: seen.append(values.get("step_seconds"))]
    with make_monitor(tmp_path, callbacks=callbacks) as monitor:
        for step in range(1, 6):
            now[0] += 1.0
            take(monitor, step)
            with monitor.pause():
                now[0] += 100.0
    assert seen[-2:] == [1.0, 1.0]


def test_the_line_of_the_first_compilation_is_printed_once(tmp_path, capsys):
    double = jax.jit(lambda x: x * 2 + 0.125)
    loss, skipped = jnp.ones(()), jnp.zeros(())
    with make_monitor(tmp_path) as monitor:
        for step in (1, 2, 3):
            with monitor.step(step, (), BATCH) as given:
                given.append({"loss": double(loss), "skipped_steps": skipped})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("compiled the first step in ")


def test_sinks_are_closed_when_the_run_fails(tmp_path):
    with pytest.raises(KeyError), make_monitor(tmp_path, sinks=("jsonl", "csv")):
        assert len(open_files(tmp_path)) == 2
        raise KeyError
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("failure", [None, KeyError("first")], ids=["none", "body"])
def test_closing_hides_no_earlier_error_and_leaves_no_file_open(tmp_path, failure):
    sinks = ("jsonl", "csv", "tensorboard")
    with (
        full_disk(12),
        pytest.raises(OutputError if failure is None else KeyError),
        make_monitor(tmp_path, sinks=sinks) as monitor,
    ):
        monitor.log(1, {"loss": 2.5})
        assert monitor.has_failed
        if failure is not None:
            raise failure
    assert open_files(tmp_path) == []


def test_a_picture_that_cannot_be_written(tmp_path):
    with make_monitor(tmp_path) as monitor:
        monitor.log(1, {"loss": 2.5})
    with full_disk(12), pytest.raises(OutputError) as error:
        monitor.save_plots()
    assert str(error.value) == (
        f"directory='{tmp_path}' cannot be written (training.png: File too large); "
        "free disk space or repair the file system, and run again"
    )
    assert monitor.save_plots() == (tmp_path / "training.png",)


def test_pictures_are_drawn_of_the_history_of_the_run(tmp_path, monkeypatch, capsys):
    """Fails if one is drawn where a function of the user went, or its lack is not
    told."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with make_monitor("run") as monitor:
        monkeypatch.chdir(tmp_path / "elsewhere")
        monitor.log(1, {"loss": 2.5})
    assert monitor.save_plots() == (tmp_path / "run" / "training.png",)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with make_monitor(tmp_path, sinks=("csv",)) as monitor:
        assert monitor.save_plots() == ()
    assert capsys.readouterr().out == ("no plot is saved: it needs the sink 'jsonl'\n")


def mfu(config, device_kind):
    """Seconds per token and MFU of a run whose clock is the real one."""
    model, how = make_model(config), {"device_kind": device_kind, "num_devices": 4}
    speed = make_throughput(config, model, **how)
    for _ in range(3):
        speed.lap(1000)
    values = speed.read()
    return values["tokens_per_second"], values.get("mfu")


@pytest.mark.parametrize(
    ("given", "device_kind", "peak"),
    [
        (0.0, "NVIDIA H200", 989.4e12),
        (50.0, "NVIDIA H200", 50e12),
        (50.0, "cpu", 50e12),
    ],
)
def test_the_peak_is_the_setting_or_the_table(given, device_kind, peak):
    config = load_config({"observe": {"peak_tflops": given}})
    tokens_per_second, value = mfu(config, device_kind)
    per_token = flops_per_token(
        config.model, config.data.length, causal_attention="half"
    )
    assert value == pytest.approx(tokens_per_second * per_token / (4 * peak))


def test_gradients_of_frozen_weights_do_not_count():
    """Under adapters a frozen weight costs 4 FLOPs, not 6; attention as ever."""
    assert mfu(load_config({}), "cpu")[1] is None  # its peak is not known
    config = load_config({"lora": {"rank": 8}, "observe": {"peak_tflops": 1.0}})
    tokens_per_second, value = mfu(config, "cpu")
    model = make_model(config)
    per_row = run_flops(model, model.inputs, config)
    per_token = per_row.seen / config.data.length
    assert value == pytest.approx(tokens_per_second * per_token / 4e12)


def test_a_model_of_the_user_has_mfu_by_row(monkeypatch):
    """Fails if rows are no unit, or if the gradient of the input counts."""
    config = load_config({"observe": {"peak_tflops": 1.0}})
    batch = models.make_batch()
    model = dataclasses.replace(models.make_mlp(), inputs=batch)
    how = {"device_kind": "cpu", "num_devices": 2, "has_tokens": False}
    clock = iter([0.0, 1.0, 2.0, 4.0]).__next__
    timer = functools.partial(Throughput, clock=clock)
    monkeypatch.setattr(monitors, "Throughput", timer)
    speed = make_throughput(config, model, **how)
    for _ in range(3):
        speed.lap(models.BATCH)
    per_row = (4 + 6) * models.WIDTH * models.HIDDEN
    expected = models.BATCH * per_row / (2.0 * 2e12)
    assert speed.read()["mfu"] == pytest.approx(expected)
