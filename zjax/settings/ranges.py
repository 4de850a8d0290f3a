"""Legal ranges of numbers, as annotations of settings."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

from zjax.errors import Problem

_Mark = TypeVar("_Mark")
MAX_STEPS = 2**31 - 1
"""Largest number of steps: counters of the state are int32."""
MAX_DEVICES = 2**20
MAX_ROWS = 2**24
"""Largest number of rows of a global batch, whose indices are a list on the host."""
MAX_LAYERS = 2**14
MAX_TOKENS = 2**24
"""Largest number of tokens of a sequence, or of a vocabulary."""
MAX_VALUE = 2**32
"""Largest value of a pacing."""
MAX_CYCLE_STEPS = 2**21 - 1
MAX_STAIRS = 2**10
"""Largest number of stairs: stairs x `MAX_CYCLE_STEPS` fits an int32."""
MAX_WIDTH = 2**22
"""Largest number of channels, heads or experts."""
_MAX_FLOAT, _MIN_FLOAT = 3e38, 1.2e-38
"""Range of float32 without overflow and without subnormal numbers."""


class Range(NamedTuple):
    """Legal values of a setting, and the remedy for illegal values."""

    contains: Callable[[float], bool]
    remedy: str
    maximum: int | float = _MAX_FLOAT
    minimum: float = -math.inf

    def remedy_for(self, value: int | float) -> str:
        """Remedy for a value out of range; empty for a legal value."""
        if not self.contains(value):
            return self.remedy
        if self.maximum < value < math.inf:
            return f"use at most {self.maximum}"
        return f"use at least {self.minimum}" if value < self.minimum else ""


class AtMost(NamedTuple):
    """Setting with a range that a number may not exceed.

    Named in the section of the number, or `config.num_steps` in the whole config.
    """

    setting: str


class Above(Problem):
    """Problem of a number in range that exceeds another setting."""


class NoneAt(NamedTuple):
    """Value of a setting that stands for none, and is not printed."""

    value: int | float


def at_least(low: int, maximum: int = MAX_STEPS) -> Range:
    """Range of finite numbers from `low` on."""
    # Comparisons with NaN are false, so NaN is out of every range.
    return Range(lambda x: low <= x < math.inf, f"use {low} or more", maximum)


def _power_of_two(x: float) -> bool:
    """Whether a number is a power of two."""
    # frexp gives a mantissa in [0.5, 1), which is 0.5 for powers of two only.
    return 0 < x < math.inf and math.frexp(x)[0] == 0.5


Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[
    float, Range(lambda x: 0 < x < math.inf, "use more than 0", minimum=_MIN_FLOAT)
]
Limit = Annotated[
    float,
    Range(lambda x: x > 0, "use more than 0, or inf for no limit", minimum=_MIN_FLOAT),
]
Fraction = Annotated[float, Range(lambda x: 0 <= x <= 1, "use 0 to 1")]
Share = Annotated[float, Range(lambda x: 0 < x <= 1, "use more than 0, up to 1")]
Decay = Annotated[float, Range(lambda x: 0 <= x < 1, "use 0 or more and less than 1")]
PowerOfTwo = Annotated[
    float,
    Range(_power_of_two, "use a power of two, such as 65536.0", 2.0**64, 2.0**-64),
]
Axis = Annotated[
    int,
    Range(
        lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for the rest", MAX_DEVICES
    ),
]
OpenAxis = Annotated[
    int,
    Range(
        lambda x: x >= -1,
        "use 1 or more, -1 for the rest, or 0 for zjax to choose",
        MAX_DEVICES,
    ),
]
Step = Annotated[
    int,
    Range(lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for never", MAX_STEPS),
]
Seed = Annotated[int, Range(lambda x: 0 <= x < 2**32, "use 0 to 4294967295")]
Rows = Annotated[int, at_least(0, MAX_ROWS)]
SomeRows = Annotated[int, at_least(1, MAX_ROWS)]
Devices = Annotated[int, at_least(0, MAX_DEVICES)]
SomeDevices = Annotated[int, at_least(1, MAX_DEVICES)]
Layers = Annotated[int, at_least(0, MAX_LAYERS)]
SomeLayers = Annotated[int, at_least(1, MAX_LAYERS)]
Tokens = Annotated[int, at_least(0, MAX_TOKENS)]
SomeTokens = Annotated[int, at_least(1, MAX_TOKENS)]
OpenTokens = Annotated[int, at_least(-1, MAX_TOKENS)]
Width = Annotated[int, at_least(0, MAX_WIDTH)]
SomeWidth = Annotated[int, at_least(1, MAX_WIDTH)]
PacedValue = Annotated[int, at_least(0, MAX_VALUE)]
Workers = Annotated[int, at_least(0, 1_024)]
Refills = Annotated[int, at_least(0, 1_024)]


def or_derived(low: int, maximum: int, meaning: str) -> Range:
    """Range of numbers from `low` on, and -1 for a number that is derived."""
    return Range(
        lambda x: x >= low or x == -1,
        f"use {low} or more, or -1 for {meaning}",
        maximum,
    )


def range_of(section: type, name: str) -> Range | None:
    """Range of a setting of a section, or None."""
    return _mark(section, name, Range)


@functools.cache
def _mark(section: type, name: str, kind: type[_Mark]) -> _Mark | None:
    """Mark of a kind in the annotation of a setting, or None."""
    hint = typing.get_type_hints(section, include_extras=True)[name]
    found = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, kind)]
    return found[0] if found else None


def is_none(section: type, name: str, value: Any) -> bool:
    """Whether a value of a setting stands for none: None, '', () or a marked number."""
    mark = _mark(section, name, NoneAt)
    is_empty = isinstance(value, tuple | str) and not value
    return value is None or is_empty or (mark is not None and value == mark.value)


def range_problems(
    section: Any, path: str = "", config: Any = None
) -> Iterator[Problem]:
    """Yields a problem for each number of a section out of range or above a limit."""
    # Numbers of nested sections may be limited by settings of the outermost section.
    config = config or section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, name, config)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if dataclasses.is_dataclass(entry):
                    yield from range_problems(entry, f"{name}[{index}]", config)
        elif allowed := range_of(type(section), field.name):
            if remedy := allowed.remedy_for(value):
                yield Problem(name, value, "is out of range", remedy)
            elif limit := _mark(type(section), field.name, AtMost):
                yield from _limit_problems(name, value, limit, section, config)


def _limit_problems(
    path: str, value: int | float, limit: AtMost, section: Any, config: Any
) -> Iterator[Problem]:
    """Yields a number above the setting that limits the number."""
    name = limit.setting.removeprefix("config.")
    is_of_section = name == limit.setting
    owner = section if is_of_section else config
    most, allowed = getattr(owner, name), range_of(type(owner), name)
    other = f"{path.rpartition('.')[0]}.{name}".strip(".") if is_of_section else name
    is_legal = allowed is not None and not allowed.remedy_for(most)
    if is_legal and value > most:
        yield Above(path, value, f"is above {other}={most}", f"use at most {most}")
