"""Sequence lengths, windows and batch shapes by step, and the length of a run."""

import bisect
import dataclasses
import fractions
import functools
from collections.abc import Iterator
from typing import Any

from zjax.errors import Problem
from zjax.schedule.pacing import (
    Pacing,
    below_problems,
    make_pacing,
    pacing_problems,
    used_pacings,
)
from zjax.settings import axes, choices, derived, schema, sequence


def steps_of(num_epochs: float, num_rows: int, global_batch_size: int) -> int:
    """Computes the steps that draw each of `num_rows` rows `num_epochs` times.

    The last batch also draws rows of the next epoch where the batch is not full.

    Example:
        >>> steps_of(2.0, 1_024, 16), steps_of(0.5, 1_025, 16)
        (128, 33)
    """
    # As written: the float nearest to 1.1 is larger, and would take a step more.
    drawn = fractions.Fraction(repr(float(num_epochs))) * num_rows
    return -(-drawn // global_batch_size)


def beside_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields a problem for a number of steps that is set beside `num_epochs`."""
    if config.num_epochs and not derived.is_offered(config.num_steps):
        problem = f"has no effect with num_epochs={config.num_epochs!r}"
        remedy = "leave it out, or set num_epochs=0"
        yield Problem("num_steps", config.num_steps, problem, remedy)


def epoch_problems(config: schema.Config, *, user_batches: bool) -> Iterator[Problem]:
    """Yields a problem for each setting that `num_epochs` cannot work with.

    With `user_batches` the caller brings batches, and `data.source` is not read.
    """
    epochs = config.num_epochs
    if not epochs:
        return
    if config.num_tokens:
        problem = f"ends the run, as does num_epochs={epochs!r}"
        yield Problem("num_tokens", config.num_tokens, problem, "leave it at 0")
    unknown = {
        "data.source='synthetic'": config.data.source == "synthetic"
        and not user_batches,
        f"buckets={choices.value_at(config, 'buckets')!r}": bool(config.buckets),
        "sequence_warmup='reshape'": isinstance(config.sequence_warmup, schema.Reshape),
        "curriculum.metrics": bool(config.curriculum.metrics),
    }
    for given, holds in unknown.items():
        if holds:
            problem = f"gives no number of steps with {given}"
            yield Problem("num_epochs", epochs, problem, "set num_steps")
    is_open = any(getattr(config.mesh, axis) == 0 for axis in axes.OPEN_AXES)
    if is_open and not config.global_batch_size:
        problem = "gives no number of steps before the mesh is chosen"
        yield Problem("num_epochs", epochs, problem, "set global_batch_size")


CUTS = schema.Truncate, schema.Reshape
"""Sections of `sequence_warmup` that cut sequences."""
_FIELD = "sequence_warmup.pacing"


def reshaped_rows(length: int, full: int, num_rows: int, unit: int) -> int:
    """Rows of a batch whose `num_rows` rows of `full` tokens are cut into pieces.

    Rows and pieces hold a target more than inputs. The result is a multiple of `unit`,
    by which devices share the pieces equally.

    Example:
        >>> reshaped_rows(length=64, full=1024, num_rows=8, unit=4)
        124

    Reference:
        DeepSpeed's `seqres`: ceil(tokens / (length + 1)) rows, made even.
    """
    pieces = -(-num_rows * (full + 1) // (length + 1))
    return pieces // unit * unit


def make_shapes(config: schema.Config) -> dict[int, tuple[int, int]]:
    """Returns (rows, tokens per row) of a batch by the first step with this shape."""
    warmup, full = config.sequence_warmup, config.data.length
    num_rows, unit = config.global_batch_size, batch_unit(config)
    if not isinstance(warmup, CUTS):
        return {1: (num_rows, full)}
    lengths = make_pacing(in_steps(config, warmup.pacing)).changes()
    if isinstance(warmup, schema.Truncate):
        return {step: (num_rows, length) for step, length in lengths.items()}
    return {
        step: (reshaped_rows(length, full, num_rows, unit), length)
        for step, length in lengths.items()
    }


def make_tokens(config: schema.Config) -> Pacing:
    """Makes the pacing of tokens per batch."""
    firsts, shapes = zip(*make_shapes(config).items(), strict=True)
    # A pacing begins at step 0; `make_shapes` counts from 1.
    return Pacing((0, *firsts[1:]), tuple(rows * length for rows, length in shapes))


def in_steps(config: schema.Config, pacing: schema.Pacing) -> schema.Pacing:
    """Converts a pacing that ends by `num_tokens` to one that ends by steps.

    The new `num_steps` exceeds the run's where the run does not reach `num_tokens`.

    Example:
        >>> pacing = schema.LinearPacing(num_tokens=100_000)
        >>> in_steps(schema.Config(), pacing).num_steps  # 32 rows of 1,024 in a step
        4
    """
    is_growing = isinstance(pacing, schema.Growing)
    if is_growing and pacing.num_tokens and config.global_batch_size:
        return _ended(pacing, _end_step(config, pacing))
    return pacing


def _ended(pacing: schema.Growing, step: int) -> Any:
    """Copies a pacing that ends by tokens so that it ends by steps."""
    return dataclasses.replace(pacing, num_steps=step, num_tokens=0)


# Cached, as several checks and schedules ask; settings are frozen and hashable.
@functools.lru_cache
def _end_step(config: schema.Config, pacing: schema.Growing) -> int:
    """First step that has consumed `num_tokens` of a pacing."""
    warmup = config.sequence_warmup
    # A range, not a list: bisection reads few items.
    steps = range(config.num_steps + 1)
    search = functools.partial(bisect.bisect_left, steps, pacing.num_tokens)
    if not isinstance(warmup, CUTS) or pacing != warmup.pacing:
        return search(key=make_tokens(config).sum_until)

    # The tokens of a step follow from the pacing whose end is searched here: each
    # candidate end has its own sum.
    def consumed(step: int) -> int:
        trial = dataclasses.replace(warmup, pacing=_ended(pacing, max(1, step)))
        trial = dataclasses.replace(config, sequence_warmup=trial)
        return make_tokens(trial).sum_until(step)

    return search(key=consumed)


def end_by_tokens(config: schema.Config) -> schema.Config:
    """Sets `num_steps` to the number of steps that consume `num_tokens`."""
    if not config.num_tokens:
        return config
    steps, tokens = range(config.num_steps + 1), make_tokens(config)
    last = bisect.bisect_left(steps, config.num_tokens, key=tokens.sum_until)
    return dataclasses.replace(config, num_steps=last)


def end_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a problem if a run ends before it has consumed `num_tokens`."""
    if not config.num_tokens or not config.global_batch_size:
        return
    if not any(_pacing_problems(config)):
        consumed = make_tokens(config).sum_until(config.num_steps)
        if consumed < config.num_tokens:
            problem = f"is above the {consumed:,} of num_steps={config.num_steps}"
            remedy = "raise num_steps, or leave it at 0"
            yield Problem("num_tokens", config.num_tokens, problem, remedy)


def token_end_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of pacings that end by steps and tokens, or after the run."""
    is_known = config.global_batch_size and not any(_pacing_problems(config))
    for field, pacing in used_pacings(config):
        if not isinstance(pacing, schema.Growing) or not pacing.num_tokens:
            continue
        num_steps, usual = pacing.num_steps, schema.LinearPacing().num_steps
        if num_steps != usual and not derived.is_derived(num_steps):
            problem = f"ends it, too, besides {field}.num_tokens={pacing.num_tokens}"
            yield Problem(f"{field}.num_steps", num_steps, problem, "leave out one")
        elif is_known and _end_step(config, pacing) > config.num_steps:
            problem = f"is not reached in num_steps={config.num_steps}"
            remedy = "use less, or raise num_steps"
            yield Problem(f"{field}.num_tokens", pacing.num_tokens, problem, remedy)


def batch_unit(config: schema.Config) -> int:
    """Number of microbatches of a step over all devices, which divides the rows.

    Without a microbatch size, which is derived when a run starts, it is the batch size.
    """
    return max(1, config.global_batch_size // (config.microbatch_size or 1))


def length_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `sequence_warmup`."""
    warmup = config.sequence_warmup
    if not warmup:
        return
    found = [*_pacing_problems(config)]
    yield from found
    if isinstance(warmup, schema.Window):
        yield from _window_problems(config, num_devices)
    # Values or functions with problems give no lengths to check.
    elif not found or isinstance(warmup.pacing, schema.Growing):
        yield from shape_problems(_FIELD, warmup.pacing, config, num_devices)


def _pacing_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields problems of the pacing of `sequence_warmup`."""
    if config.sequence_warmup:
        yield from token_problems(_FIELD, config.sequence_warmup.pacing, config)


def token_problems(
    field: str, pacing: schema.Pacing, config: schema.Config
) -> Iterator[Problem]:
    """Yields problems of a pacing of tokens per sequence."""
    longest = "data.length", config.data.length
    found = [
        *pacing_problems(field, pacing, num_steps=config.num_steps, longest=longest)
    ]
    yield from found or below_problems(
        field,
        pacing,
        "end",
        longest,
        effect=": no step would be whole",
        remedy="end with {0}, or set {1}={2}",
    )


def _window_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of growing windows with the model and the mesh."""
    model = config.model
    if model.kind == "encoder":
        problem = "looks back alone, and tokens of model.kind='encoder' look both ways"
        yield Problem("sequence_warmup", "window", problem, "use None")
    if axes.mesh_fills(config, num_devices):
        sizes = axes.axis_sizes(config, num_devices)
        split = {axis: sizes[axis] for axis in ("sequence", "tensor")}
        method = sequence.sequence_method(model, **split)
        if split["sequence"] > 1 and method != "ulysses":
            yield sequence.window_problem(method)


def shape_problems(
    prefix: str, pacing: schema.Pacing, config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields lengths that devices or sparse blocks do not divide, each field once."""
    for name, length in _units(pacing):
        found = [*divisor_problems(f"{prefix}.{name}", length, config, num_devices)]
        if found:
            yield from found
            return


def divisor_problems(
    field: str, length: int, config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields devices and sparse blocks that do not divide a number of tokens."""
    if axes.mesh_fills(config, num_devices):
        sizes = axes.axis_sizes(config, num_devices)
        split = {axis: sizes[axis] for axis in ("sequence", "tensor")}
        yield from sequence.length_problems(field, length, config.model, **split)
    block = choices.value_at(config, "model.attention.block")
    if block and length % block:
        problem = f"is not a multiple of model.attention.block={block}"
        yield Problem(field, length, problem, f"use {block} or a multiple of it")


def _units(pacing: schema.Pacing) -> Iterator[tuple[str, int]]:
    """Yields numbers that divide all lengths, after the names of the settings."""
    match pacing:
        case schema.Growing():
            yield "multiple", pacing.multiple
        case schema.DiscretePacing():
            yield from (("values", value) for value in pacing.values)
        case schema.CustomPacing():
            yield from (("function", value) for value in make_pacing(pacing).values)
