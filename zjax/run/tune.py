"""Finds the fastest settings for a model of the user, by predictions and trials."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.errors import ConfigError, DataError, Problem, ZjaxError
from zjax.estimate.candidates import (
    Candidate,
    Predictor,
    candidates,
    given_candidate,
    with_batch,
)
from zjax.estimate.mesh import this_machine
from zjax.estimate.search import (
    OUT_OF_MEMORY,
    Outcome,
    describe_candidate,
    describe_outcomes,
    search,
)
from zjax.run.initialize import initialize, prepare
from zjax.settings.schema import Config
from zjax.typing import Batch, Device

WARM_UP_STEPS, TIMED_STEPS = 3, 5


def tune(
    model: Any,
    tx: Any,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    config: Any = None,
    *,
    num_trials: int = 4,
    replicated: Sequence[str] = (),
    cast: Sequence[str] | None = None,
    devices: Sequence[Device] | None = None,
) -> Config:
    """Finds the fastest settings of a run of `initialize`, and logs a table of trials.

    Microbatch size, ZeRO stage, offload of the optimizer state, and the axes of the
    mesh that the model can use are varied; memory and time are predicted from the
    traced loss, and a few steps of the most promising settings are timed on the
    devices. The global batch, axes above 1 and all other settings stay. `zjax tune`
    does the same for a config file of a built-in model.

    Args:
        model: As for `initialize`.
        tx: As for `initialize`.
        loss_fn: As for `initialize`.
        batch: Global batch of arrays, on which the trials train.
        config: As for `initialize`.
        num_trials: Number of settings to time, 1 or more.
        replicated: As for `initialize`.
        cast: As for `initialize`.
        devices: As for `initialize`.

    Returns:
        The config of the fastest trial, for `initialize`.

    Raises:
        ConfigError: Settings that cannot work, several processes, or `num_trials`
            below 1.
        DataError: A batch of shapes without values.
        PlanError: No settings fit, or all trials failed.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> def loss_fn(model, batch, key):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> def init(key):
        ...     return {"w": jnp.zeros((4, 1))}
        >>> def apply(params, x):
        ...     return x @ params["w"]
        >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
        >>> given = (init, apply), optax.sgd(0.1), loss_fn, batch
        >>> config = tune(*given, num_trials=1)
        >>> run = initialize(*given, config)
    """
    _check(num_trials, batch)
    devices = jax.devices() if devices is None else devices
    options = {"replicated": replicated, "cast": cast, "devices": devices}
    base, own = prepare(model, tx, loss_fn, batch, config, **options)
    machine = this_machine(devices)
    given, base = given_candidate(base, machine, own), with_batch(base, machine)
    predictor = Predictor(base, machine, devices[0].device_kind, own)
    ranked = sorted(candidates(base, machine, own), key=predictor.seconds)
    outcomes = list[Outcome]()

    def measure(candidate: Candidate) -> Outcome:
        speed, failure = 0.0, ""
        try:
            chosen = candidate.apply(base)
            seconds = _time_steps(model, tx, loss_fn, batch, chosen, **options)
            speed = base.global_batch_size / seconds / len(devices)
        except ZjaxError as error:
            ran_out = isinstance(error.__cause__, jax.errors.JaxRuntimeError)
            problem = str(error.problems[0]).partition(";")[0]
            failure = OUT_OF_MEMORY if ran_out else problem
        said = failure or f"{speed:,.1f} rows/s per device"
        logging.warning("trial: %s: %s", describe_candidate(candidate), said)
        predicted = predictor.num_bytes(candidate)
        return Outcome(candidate, predicted, speed, failure=failure)

    best = search(
        *(ranked, given, outcomes, predictor, measure),
        num_trials=num_trials,
        log="the log of the trials",
    )
    logging.warning("tune:\n%s", describe_outcomes(outcomes, given, "rows"))
    return best.candidate.apply(base)


def _check(num_trials: int, batch: Batch) -> None:
    """Refuses what no trial could use."""
    problems = []
    if num_trials < 1:
        problems.append(Problem("num_trials", num_trials, "tries nothing", "use 1"))
    if (number := jax.process_count()) > 1:
        problem = "would time and choose apart"
        remedy = "tune in one process, and give all processes the config"
        problems.append(Problem("processes", number, problem, remedy))
    if problems:
        raise ConfigError(*problems)
    leaves = jax.tree.leaves(batch)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        problem, remedy = "has shapes and no values", "give arrays, to train on"
        raise DataError(Problem("batch", None, problem, remedy))


def _time_steps(
    model: Any, tx: Any, loss_fn: Any, batch: Batch, config: Config, **options: Any
) -> float:
    """Returns the median of the seconds of a few steps of a new run."""
    # Arrays of the trial before, which a cycle of references may keep.
    gc.collect()
    run = initialize(model, tx, loss_fn, batch, config, **options)
    # On the host, so that each step pays for the transfer, as with a loader.
    batch, state, seconds = jax.tree.map(np.asarray, batch), run.state, []
    for number in range(WARM_UP_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        state, metrics = run.step(state, batch)
        jax.block_until_ready((state, metrics))
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
