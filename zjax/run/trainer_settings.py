"""Checks of the settings of a trainer, and the description of a run at the start."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from zjax import data
from zjax.config.check import check_config
from zjax.data.taught import is_stored
from zjax.errors import ConfigError, Problem
from zjax.estimate.mesh import choose_mesh
from zjax.estimate.tables import kept_rows
from zjax.models.build import make_model
from zjax.observe.sinks import check_sinks
from zjax.ops import matmul
from zjax.optim.build import with_clipping_as_set
from zjax.optim.precision import describe_precision
from zjax.run.batch import with_batch_sizes
from zjax.run.build import Run
from zjax.run.pruned_start import note_given_batches
from zjax.schedule.lengths import CUTS, end_by_tokens
from zjax.schedule.pacing import tokens_that_end
from zjax.settings import choices
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.describe import describe_plan_totals
from zjax.sharding.placement import abstract_key
from zjax.train.average import parts_of
from zjax.train.state import TrainState
from zjax.typing import Device, Model


def checked_settings(
    config: Config,
    model: Any,
    tx: Any,
    batches: Any,
    evaluation_batches: Any,
    devices: Sequence[Device],
    others: Sequence[Problem] = (),
) -> Config:
    """Returns the settings for these devices, or raises all problems together.

    `others` are problems that the trainer itself has found.
    """
    user_model = not is_of_settings(model, config)
    if model is None:
        config = choose_mesh(config, devices, tx)
    check = functools.partial(
        check_config,
        num_devices=len(devices),
        user_model=user_model,
        user_optimizer=tx is not None,
        user_batches=batches is not None,
    )
    # Token budgets are turned into steps only once settings are known to be valid.
    check(config)
    if config.num_tokens or any(tokens_that_end(config).values()):
        config = end_by_tokens(with_batch_sizes(config, len(devices)))
        check(config)
    problems = _mismatches(model, batches, config)
    problems += others
    problems += data.batches_problems("batches", batches)
    problems += data.batches_problems("evaluation_batches", evaluation_batches)
    stopping = config.evaluation.early_stopping
    if stopping and batches is not None and evaluation_batches is None:
        problem, remedy = "has no evaluation data", "give evaluation_batches"
        field, value = "evaluation.early_stopping.patience", stopping.patience
        problems += [Problem(field, value, problem, remedy)]
    if problems:
        raise ConfigError(*problems)
    if tx is not None:
        optimizer = with_clipping_as_set(config.optimizer)
        config = dataclasses.replace(config, optimizer=optimizer)
    if config.precision.matmul_dtype == "float8":
        matmul.check_device(devices[0])
    check_sinks(config.observe)
    if batches is not None:
        note_given_batches(config)
    return with_batch_sizes(config, len(devices))


def is_of_settings(model: Any, config: Config) -> bool:
    """Whether a model is the decoder of the settings, with any head or loss."""
    if not isinstance(model, Model):
        return model is None
    if model.stack is None or model.stack.continuation is None:
        return False
    given, built = (
        jax.eval_shape(x.init, abstract_key()) for x in (model, make_model(config))
    )
    return given == built


def read_elsewhere(config: Config) -> list[Problem]:
    """Lists settings that other trainers read than `zjax.Trainer`."""
    remedies = {
        "rl": "use zjax rl, or zjax.rl.Trainer",
        "preference": "use zjax train, or zjax.rl.PreferenceTrainer",
        "compress": "use zjax compress",
    }
    problem = "is not read by zjax.Trainer"
    return [
        Problem(name, choices.value_at(config, name), problem, remedy)
        for name, remedy in remedies.items()
        if getattr(config, name)
    ]


def unread_loss(loss_fn: Any) -> list[Problem]:
    """Lists a loss given apart from the model, with the way to join model and loss."""
    if loss_fn is None:
        return []
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    problem = "is read as a part of the model"
    remedy = "give model=zjax.adapt(model, loss_fn, batch)"
    return [Problem("loss_fn", name, problem, remedy)]


def _mismatches(model: Any, batches: Any, config: Config) -> list[Problem]:
    """Lists settings that the given model or batches cannot follow."""
    problems = []
    if batches is not None and config.zero.optimizer_memory == "auto":
        problem = "cannot be planned for batches that are not known yet"
        remedy = "use 'pinned_host' or 'nvme', or zjax.initialize"
        problems.append(Problem("zero.offload", "auto", problem, remedy))
    if batches is not None and isinstance(config.sequence_warmup, CUTS):
        problem, remedy = "does not cut given batches", "use 'window' or None"
        kind = config.sequence_warmup.kind
        problems.append(Problem("sequence_warmup", kind, problem, remedy))
    ends = {"num_tokens": config.num_tokens} | tokens_that_end(config)
    for field, number in ends.items() if batches is not None else ():
        if number:
            problem = "does not count the tokens of given batches"
            problems.append(Problem(field, number, problem, "leave it at 0"))
    if batches is not None and config.buckets:
        problem, remedy = "does not cut given batches", "leave it out"
        kind = config.buckets.kind
        problems.append(Problem("buckets", kind, problem, remedy))
    if batches is not None and config.curriculum.metrics:
        problem, remedy = "do not order given batches", "leave it at ()"
        metrics = tuple(metric.index for metric in config.curriculum.metrics)
        problems.append(Problem("curriculum.metrics", metrics, problem, remedy))
    distill = config.distill
    if batches is not None and distill and is_stored(distill.teacher):
        problem = "is stored for rows of data, not for given batches"
        remedy = "give the run of the teacher"
        problems.append(Problem("distill.teacher", distill.teacher, problem, remedy))
    if model is not None and not isinstance(model, Model):
        remedy = "use zjax.adapt(model, loss_fn, batch)"
        name = type(model).__name__
        problems.append(Problem("model", name, "is not a zjax.Model", remedy))
    if batches is None and not is_of_settings(model, config):
        remedy = "give the batches that its loss reads"
        problems.append(Problem("batches", None, "leave the model no data", remedy))
    return problems


def describe_start(
    run: Run, state: TrainState, notes: Sequence[str], evaluation: str
) -> str:
    """Describes a run in lines of at most 100 columns.

    `notes` describe the data, and `evaluation` the evaluation data; each may be empty.
    """
    config, plan, step = run.config, run.plan, int(state.step)
    sizes = resolve_batch(config, plan.num_batch_shares)
    start = f"continues at step {step}" if step else "starts from step 0"
    part = f"evaluation: {evaluation}, weights {parts_of(state)[0]}"
    return "\n".join(
        [
            describe_plan_totals(plan, kept_rows(plan, config)),
            describe_precision(config.precision, config.optimizer.rule),
            f"batch: {sizes.global_batch_size} = {sizes.microbatch_size} per share "
            f"x {plan.num_batch_shares} shares x "
            f"{sizes.num_microbatches} microbatches; {start}, "
            f"ends at {config.num_steps}",
            *(note for note in notes if note),
            part if evaluation else "evaluation: none",
        ]
    )
