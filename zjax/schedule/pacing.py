"""Pacing: integers that grow over the steps of a run, as lengths and difficulties."""

import bisect
import dataclasses
import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from zjax.errors import ConfigError, Problem
from zjax.settings import choices, schema

_NAME = re.compile(r"[\w.]+:\w+")


class Fault(NamedTuple):
    """Reason why a function cannot be used, with the remedy."""

    problem: str
    remedy: str


def is_function_name(name: str) -> bool:
    """Whether a text has the form `module:function`.

    Example:
        >>> is_function_name("math:sqrt"), is_function_name("sqrt")
        (True, False)
    """
    return _NAME.fullmatch(name) is not None


def find_function(name: str) -> Callable[..., Any] | Fault:
    """Imports a function by the name `module:function`, or returns the fault."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    # Importing runs the user's module, which may raise anything.
    except Exception as error:
        problem = f"cannot be imported ({type(error).__name__}: {error})"
        return Fault(problem, "run where Python finds the module, or mend it")
    if not callable(function):
        return Fault("names no function", f"define {attribute} in {module}")
    return function


@dataclasses.dataclass(frozen=True)
class Pacing:
    """Values that never fall, each from a first step on."""

    firsts: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def start(self) -> int:
        """Value of step 0."""
        return self.values[0]

    @property
    def end(self) -> int:
        """Last value."""
        return self.values[-1]

    @property
    def num_steps(self) -> int:
        """First step of the last value."""
        return self.firsts[-1]

    def at(self, step: int) -> int:
        """Returns the value of a step, 0 or more; callers count from 0 or from 1."""
        return self.values[bisect.bisect_right(self.firsts, step) - 1]

    def changes(self) -> dict[int, int]:
        """Maps first steps, counted from 1, to values, in order."""
        pairs = zip(self.firsts, self.values, strict=True)
        # A value of step 0 alone is overwritten by the value from step 1 on.
        return {max(1, first): value for first, value in pairs}

    def sum_until(self, step: int) -> int:
        """Sums the values of steps 1 to `step`."""
        ends = itertools.pairwise([*self.changes().items(), (step + 1, 0)])
        return sum(
            value * max(0, min(after, step + 1) - first)
            for (first, value), (after, _) in ends
        )


def hold(value: int) -> Pacing:
    """Makes a pacing with one value for all steps."""
    return Pacing((0,), (value,))


def grow(
    start: int, end: int, num_steps: int, *, multiple: int = 1, degree: int = 1
) -> Pacing:
    """Makes a pacing that grows with the step, or with a root of it, in exact integers.

    Args:
        start: Value of step 0.
        end: Value from `num_steps` on, `start` or more.
        num_steps: First step of `end`, 1 or more.
        multiple: Divisor of all values, which are rounded down; divides `start` and
            `end`.
        degree: Degree of the root, 1 or more: 1 is linear, 2 the square root.

    Example:
        >>> lengths = grow(8, 1024, 15_000, multiple=8)
        >>> [lengths.at(step) for step in (1, 119, 500, 7_500, 14_999, 15_000)]
        [8, 16, 40, 512, 1016, 1024]
        >>> percentiles = grow(1, 100, 110_000, degree=2)
        >>> [percentiles.at(step) for step in (1, 1_100, 27_500, 110_000)]
        [1, 10, 50, 100]

    Reference:
        Li et al., DeepSpeed Data Efficiency (arXiv:2212.03597), section 3.1.
    """
    # Integers throughout: floats would move some changes by a step.
    span, whole = end - start, max(1, end - start) ** degree
    firsts, values = [0], [start]
    while values[-1] < end:
        least = values[-1] + multiple - start
        # First step whose root reaches `least`: an exact ceiling.
        first = -(-(least**degree) * num_steps // whole)
        grown = _floor_root(first, num_steps, span, degree)
        firsts.append(first)
        values.append(start + grown - grown % multiple)
    return Pacing(tuple(firsts), tuple(values))


def _floor_root(step: int, num_steps: int, span: int, degree: int) -> int:
    """Integer part of (step / num_steps)**(1 / degree) * span, at most `span`."""

    def is_reached(grown: int) -> bool:
        return grown**degree * num_steps <= step * span**degree

    grown = min(int((step / num_steps) ** (1 / degree) * span), span)
    while not is_reached(grown):  # float64 may be wrong by one
        grown -= 1
    while grown < span and is_reached(grown + 1):
        grown += 1
    return grown


def metric_field(number: int) -> str:
    """Path of the settings of a curriculum metric."""
    return f"curriculum.metrics[{number}]"


def used_pacings(config: schema.Config) -> Iterator[tuple[str, schema.Pacing]]:
    """Yields the path and the settings of each pacing that a run reads."""
    if config.sequence_warmup:
        yield "sequence_warmup.pacing", config.sequence_warmup.pacing
    for number, metric in enumerate(config.curriculum.metrics):
        yield f"{metric_field(number)}.pacing", metric.pacing
    if config.buckets and isinstance(config.buckets.order, schema.Paced):
        yield "buckets.order.pacing", config.buckets.order.pacing
    if config.random_ltd:
        yield "random_ltd.pacing", config.random_ltd.pacing


def tokens_that_end(config: schema.Config) -> dict[str, int]:
    """Consumed tokens that end each growth of a run, by path; 0 for steps."""
    return {
        f"{field}.num_tokens": pacing.num_tokens
        for field, pacing in used_pacings(config)
        if isinstance(pacing, schema.Growing)
    }


# Cached: checks and the run call a user's function again.
@functools.lru_cache
def _call_each(name: str, num_steps: int) -> tuple[int, ...] | Fault:
    """Calls a user's function at steps 0 to `num_steps`; returns values or a fault."""
    remedy = "return an int of 1 or more that never falls"
    if not is_function_name(name):
        return Fault("is not the name of a function", "use module:function")
    function = find_function(name)
    if isinstance(function, Fault):
        return function
    values: list[int] = []
    for step in range(num_steps + 1):
        try:
            value = function(step)
        except Exception as error:  # a user's function may raise anything
            problem = f"fails at step {step} ({type(error).__name__}: {error})"
            return Fault(problem, remedy)
        if type(value) is not int or value < 1:  # a bool is an int to `isinstance`
            return Fault(f"gives {value!r} at step {step}", remedy)
        if values and value < values[-1]:
            problem = f"falls from {values[-1]} to {value} at step {step}"
            return Fault(problem, remedy)
        values.append(value)
    return tuple(values)


def make_pacing(settings: schema.Pacing) -> Pacing:
    """Makes the pacing of checked settings that end in steps, not in tokens.

    Raises `ConfigError` if the user's function is missing, fails or falls.
    """
    match settings:
        case schema.DiscretePacing():
            firsts = (0, *(last + 1 for last in settings.last_steps))
            return Pacing(firsts, settings.values)
        case schema.CustomPacing():
            found = _call_each(settings.function, settings.num_steps)
            if isinstance(found, Fault):
                name = settings.function
                raise ConfigError(Problem("pacing.function", name, *found))
            starts = [0, *(i for i in range(1, len(found)) if found[i] > found[i - 1])]
            return Pacing(tuple(starts), tuple(found[i] for i in starts))
    return grow(
        settings.start,
        settings.end,
        settings.num_steps,
        multiple=settings.multiple,
        degree=settings.degree if isinstance(settings, schema.RootPacing) else 1,
    )


def settings_read(field: str, settings: schema.Pacing) -> dict[str, Any]:
    """Settings by path that determine the values, compared where a run continues.

    Example:
        >>> settings_read("pacing", schema.LinearPacing(start=8, end=64, multiple=8))
        {'pacing.kind': 'linear', 'pacing.start': 8, 'pacing.end': 64, \
'pacing.num_steps': 1000, 'pacing.num_tokens': 0, 'pacing.multiple': 8}
    """
    read = {"kind": settings.kind} | {
        name: getattr(settings, name) for name in choices.names(type(settings))
    }
    if isinstance(settings, schema.CustomPacing):
        pacing = make_pacing(settings)
        # A function's name says nothing about its values, which must not change.
        read |= {"values": pacing.values, "firsts": pacing.firsts}
    return {
        f"{field}.{name}": list(value) if isinstance(value, tuple) else value
        for name, value in read.items()
    }


def pacing_problems(
    field: str,
    settings: schema.Pacing,
    *,
    num_steps: int,
    longest: tuple[str, int] | None,
) -> Iterator[Problem]:
    """Yields problems of a pacing at the path `field`.

    `longest` is name and value of the setting that no value may exceed, if there is
    one.
    """
    match settings:
        case schema.DiscretePacing():
            yield from _discrete_problems(field, settings)
            last_step, name = max(settings.last_steps, default=-1) + 1, "last_steps"
            values = settings.values
        case schema.CustomPacing():
            found = _call_each(settings.function, settings.num_steps)
            last_step, name = settings.num_steps, "num_steps"
            values = () if isinstance(found, Fault) else found
            if isinstance(found, Fault):
                yield Problem(f"{field}.function", settings.function, *found)
        case _:
            yield from _growth_problems(field, settings, longest)
            # Tokens end the growth in place of steps.
            last_step = 0 if settings.num_tokens else settings.num_steps
            name, values = "num_steps", ()
    if last_step > num_steps:
        problem, most = f"is beyond num_steps={num_steps}", f"use at most {num_steps}"
        remedy = f"end before step {num_steps}" if name == "last_steps" else most
        yield Problem(f"{field}.{name}", getattr(settings, name), problem, remedy)
    if longest and values and max(values) > longest[1]:
        is_listed = isinstance(settings, schema.DiscretePacing)
        name = "values" if is_listed else "function"
        problem = f"reaches {max(values)}, above {longest[0]}={longest[1]}"
        remedy = f"use at most {longest[1]}"
        yield Problem(f"{field}.{name}", getattr(settings, name), problem, remedy)


def below_problems(
    field: str,
    settings: schema.Pacing,
    bound: Literal["start", "end"],
    least: tuple[str, int],
    effect: str = "",
    remedy: str = "use {0}",
) -> Iterator[Problem]:
    """Yields a problem if the first or the last value is below another setting.

    `remedy` is a format of value and name of the other setting, and of the low value.
    """
    name = {"discrete": "values", "custom": "function"}.get(settings.kind, bound)
    value = getattr(settings if name == bound else make_pacing(settings), bound)
    if value < least[1]:
        verb = "begins" if bound == "start" else "ends"
        problem = "is" if name == bound else f"{verb} with {value},"
        problem += f" below {least[0]}={least[1]}{effect}"
        remedy = remedy.format(least[1], least[0], value)
        yield Problem(f"{field}.{name}", getattr(settings, name), problem, remedy)


def _growth_problems(
    field: str, settings: schema.Growing, longest: tuple[str, int] | None
) -> Iterator[Problem]:
    """Yields problems of a linear or root pacing."""
    start, end, multiple = settings.start, settings.end, settings.multiple
    end_name = f"{field}.end"
    if longest and end > longest[1]:
        problem = f"is above {longest[0]}={longest[1]}"
        yield Problem(end_name, end, problem, f"use at most {longest[1]}")
    elif longest and end == longest[1]:
        end_name = longest[0]
    if end and start >= end:
        problem = f"is not below {end_name}={end}"
        yield Problem(f"{field}.start", start, problem, "use a smaller one")
    for name, value in ((f"{field}.start", start), (end_name, end)):
        if value % multiple:
            problem, remedy = f"does not divide {name}={value}", "use a divisor"
            yield Problem(f"{field}.multiple", multiple, problem, remedy)


def _discrete_problems(
    field: str, settings: schema.DiscretePacing
) -> Iterator[Problem]:
    """Yields problems of a discrete pacing."""
    values, last_steps = settings.values, settings.last_steps
    for name, numbers in (("values", values), ("last_steps", last_steps)):
        if any(after <= before for before, after in itertools.pairwise((0, *numbers))):
            problem, remedy = "does not rise from 1 or more", "sort the numbers"
            yield Problem(f"{field}.{name}", numbers, problem, remedy)
    if not values:
        problem, remedy = "is empty for kind='discrete'", "name each value"
        yield Problem(f"{field}.values", values, problem, remedy)
    elif len(last_steps) != len(values) - 1:
        problem = f"has {len(last_steps)} steps for {len(values)} values"
        remedy = f"name the last step of each but the last: {len(values) - 1} steps"
        yield Problem(f"{field}.last_steps", last_steps, problem, remedy)
