"""The search of `zjax tune`: the next candidate to try, and the table of trials."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from zjax.errors import PlanError, Problem
from zjax.estimate.candidates import Candidate
from zjax.settings import axes
from zjax.sharding.describe import format_bytes, render_table

OUT_OF_MEMORY = "out of memory"
_PLAUSIBLE = 1.15
"""Ratio of predicted seconds to the best, above which candidates are not tried."""
_AFTER_FAILURE = 0.8
"""Fraction of predicted bytes that ran out of memory, up to which candidates fit."""
_LEAST_SCALE, _MOST_SCALE = 0.7, 1.3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a trial of a candidate.

    Args:
        tokens_per_second: Tokens per second and device, or rows of a model of the user;
            0 if the trial failed.
        peak_bytes: Measured bytes per device; 0 if unknown.
        failure: Reason of a failure; empty if the trial succeeded.
    """

    candidate: Candidate
    predicted_bytes: int | float
    tokens_per_second: int | float = 0.0
    peak_bytes: int | float = 0.0
    failure: str = ""


@runtime_checkable
class Predictions(Protocol):
    """Interface of a `Predictor` to the search."""

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a step may take."""
        ...

    def obstacle(self, candidate: Candidate) -> str:
        """Reason why a candidate cannot work; empty if it can."""
        ...

    def num_bytes(self, candidate: Candidate) -> int | float:
        """Predicted bytes per device of a step."""
        ...

    def seconds(self, candidate: Candidate) -> float:
        """Predicted seconds of a step, to rank candidates by."""
        ...


def search(
    ranked: Sequence[Candidate],
    given: Candidate | None,
    outcomes: list[Outcome],
    predictions: Predictions,
    measure: Callable[[Candidate], Outcome],
    *,
    num_trials: int,
    log: str,
) -> Outcome:
    """Adds trials to `outcomes` until there are `num_trials`; returns the fastest.

    A PlanError says why no trial succeeded, and names the `log` of the trials.
    """
    while len(outcomes) < num_trials:
        candidate = next_candidate(ranked, given, outcomes, predictions)
        if candidate is None:
            break
        outcomes.append(measure(candidate))
    best = fastest(outcomes)
    if best is None:
        raise PlanError(_unfit(outcomes, ranked, predictions, log))
    return best


def next_candidate(
    ranked: Sequence[Candidate],
    given: Candidate | None,
    outcomes: Sequence[Outcome],
    predictions: Predictions,
) -> Candidate | None:
    """Chooses the candidate of the next trial; None if no candidate promises more.

    First the given settings, if they fit; then the best by prediction, until a trial
    works; then neighbours of the fastest in one choice. `ranked` is sorted by predicted
    seconds. Out-of-memory failures and measured peaks correct the predicted bytes that
    fit.
    """
    tried = {outcome.candidate for outcome in outcomes}
    limit = _limit(outcomes, predictions.usable_bytes)

    def fits(candidate: Candidate) -> bool:
        if candidate in tried or predictions.obstacle(candidate):
            return False
        return predictions.num_bytes(candidate) <= limit

    if given and fits(given):
        return given
    best = fastest(outcomes)
    # The given settings may be slow: the best prediction is tried, too.
    if not best or all(x.candidate == given for x in outcomes if not x.failure):
        return next(filter(fits, ranked), None)
    longest = _PLAUSIBLE * predictions.seconds(best.candidate)
    near = (
        candidate
        for candidate in ranked
        if _is_near(candidate, best.candidate, ranked)
        and predictions.seconds(candidate) <= longest
    )
    return next(filter(fits, near), None)


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Trial with the most tokens per second; None if all failed."""
    done = [outcome for outcome in outcomes if not outcome.failure]
    return max(done, key=lambda x: x.tokens_per_second, default=None)


def _limit(outcomes: Sequence[Outcome], usable: int | float) -> float:
    """Predicted bytes up to which a candidate counts as fitting."""
    ratios = [x.peak_bytes / x.predicted_bytes for x in outcomes if x.peak_bytes]
    scale = statistics.median(ratios) if ratios else 1.0
    # Bounds keep one odd measurement from moving the limit far.
    limit = usable / min(max(scale, _LEAST_SCALE), _MOST_SCALE)
    failed = [x.predicted_bytes for x in outcomes if x.failure == OUT_OF_MEMORY]
    return min([limit, *(_AFTER_FAILURE * size for size in failed)])


def _is_near(one: Candidate, best: Candidate, ranked: Sequence[Candidate]) -> bool:
    """Whether two candidates differ in one choice; microbatch sizes are adjacent."""
    values = dataclasses.asdict(one), dataclasses.asdict(best)
    changed = [name for name in values[0] if values[0][name] != values[1][name]]
    if changed != ["microbatch_size"]:
        return len(changed) == 1
    sizes = sorted(
        {x.microbatch_size for x in ranked if _differs_in_size(x, best)}
        | {best.microbatch_size}
    )
    here = sizes.index(best.microbatch_size)
    return one.microbatch_size in sizes[max(0, here - 1) : here + 2]


def _differs_in_size(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates are equal up to the microbatch size."""
    return dataclasses.replace(one, microbatch_size=other.microbatch_size) == other


def describe_candidate(candidate: Candidate) -> str:
    """Describes a candidate in one line.

    Example:
        >>> describe_candidate(Candidate(8, 2, "full", tensor=2, offload="state"))
        'microbatch 8, ZeRO 2, remat full, tensor 2, state offloaded'
    """
    parts = [f"microbatch {candidate.microbatch_size}"] * bool(
        candidate.microbatch_size
    )
    parts += [f"ZeRO {candidate.stage}"]
    parts += [f"remat {candidate.remat}"] * bool(candidate.remat)
    parts += [_describe_mesh(candidate)] * bool(_describe_mesh(candidate))
    if candidate.offload != "none":
        parts += [f"{candidate.offload} offloaded"]
    return ", ".join(parts)


def describe_outcomes(
    outcomes: Sequence[Outcome], given: Candidate | None, unit: str = "tokens"
) -> str:
    """Formats a table of trials in order, without empty columns; `given` is marked."""
    best, stages = fastest(outcomes), {x.candidate.stage for x in outcomes}
    columns = {
        "": [str(number) for number in range(1, len(outcomes) + 1)],
        "micro": [str(x.candidate.microbatch_size or "") for x in outcomes],
        "ZeRO": [str(x.candidate.stage) for x in outcomes] if len(stages) > 1 else [],
        "remat": [x.candidate.remat for x in outcomes],
        "mesh": [_describe_mesh(x.candidate) for x in outcomes],
        "offload": [x.candidate.offload.replace("none", "") for x in outcomes],
        "predicted": [format_bytes(x.predicted_bytes) for x in outcomes],
        "peak": [format_bytes(x.peak_bytes) if x.peak_bytes else "" for x in outcomes],
        f"{unit}/s": [
            f"{x.tokens_per_second:,.0f}" if not x.failure else "" for x in outcomes
        ],
        " ": [_note(x, best, given) for x in outcomes],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    numbers = ("", "micro", "ZeRO", "predicted", "peak", f"{unit}/s")
    right = [index for index, name in enumerate(shown) if name in numbers]
    rows = zip(*shown.values(), strict=True)
    return render_table([*shown], rows, right=right)


def _note(outcome: Outcome, best: Outcome | None, given: Candidate | None) -> str:
    """Failure of a trial, or marks of the given and the fastest settings."""
    notes = [outcome.failure] * bool(outcome.failure)
    notes += ["as given"] * (outcome.candidate == given)
    notes += ["fastest"] * (outcome is best)
    return ", ".join(notes)


def _describe_mesh(candidate: Candidate) -> str:
    """Axes of a candidate that are larger than 1."""
    sizes = {axis: getattr(candidate, axis) for axis in axes.OPEN_AXES}
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _unfit(
    outcomes: Sequence[Outcome],
    ranked: Sequence[Candidate],
    predictions: Predictions,
    log: str,
) -> Problem:
    """Explains why no candidate works, fits or succeeded."""
    if outcomes:
        problem = f"fail, the last with: {outcomes[-1].failure}"
        return Problem("trials", len(outcomes), problem, f"see {log}")
    possible = [x for x in ranked if not predictions.obstacle(x)]
    sizes = {x: predictions.num_bytes(x) for x in possible}
    if not sizes:
        why = predictions.obstacle(ranked[0]) if ranked else "no mesh divides the batch"
        problem = f"has no settings that can work: {why}"
        return Problem("trials", 0, problem, "change the settings that it names")
    least = min(sizes, key=sizes.__getitem__)
    problem = (
        f"has no settings that fit: {describe_candidate(least)} takes "
        f"{sizes[least] / 1e9:.1f} GB of {predictions.usable_bytes / 1e9:.1f} GB"
    )
    return Problem("trials", 0, problem, "use more devices, or a smaller model")
