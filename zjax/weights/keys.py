"""Keys of a config.json that are settings, and what is wrong with their values."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.errors import ConfigError, Problem

REQUIRED = "required"
"""Default of a key that must be present."""


class Fault(NamedTuple):
    """Value of a JSON file that zjax does not read, without the path of the file."""

    name: str
    value: Any
    problem: str
    remedy: str = "correct it there"


def refused(name: str, value: Any, why: str) -> Fault:
    """Returns the fault of a value that zjax does not compute."""
    problem = f"is not supported: {why}"
    return Fault(name, value, problem, "use a checkpoint without it")


def check(faults: Iterable[Fault], path: pathlib.Path) -> None:
    """Raises a ConfigError with all faults of a file."""
    problems = [
        Problem(x.name, x.value, f"of {path} {x.problem}", x.remedy)
        if x.value is not REQUIRED
        else Problem(x.name, None, f"is missing from {path}", x.remedy)
        for x in faults
    ]
    if problems:
        raise ConfigError(*problems)


def wrong_type(name: str, value: Any, *kinds: type) -> Iterator[Fault]:
    """Yields a fault if a value has another type than the given types."""
    # Exact types, since True must not pass as an int; an int may stand for a float.
    is_int_for_float = type(value) is int and float in kinds
    if type(value) not in kinds and not is_int_for_float:
        yield Fault(name, value, f"is not of type {kinds[0].__name__}")


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a config.json that is a setting.

    Args:
        setting: Setting of `model`, with a dot for a setting of a section.
        kind: Type of the value.
        default: Value if the key is absent; None for a setting that zjax derives
            equally.
        is_nullable: Whether null is a value, for a setting of 0.
        names: Settings by value, where the names differ; a setting without a value is
            written as the first value.
    """

    setting: str
    kind: type
    default: Any = REQUIRED
    is_nullable: bool = False
    names: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def to_setting(self, value: Any) -> Any:
        """Converts a value to the setting."""
        if value is None:
            return 0
        return self.names[value] if self.names else self.kind(value)

    def to_value(self, setting: Any) -> Any:
        """Converts a setting to the value."""
        if self.names:
            values = (x for x, name in self.names.items() if name == setting)
            return next(values, next(iter(self.names)))
        value = self.kind(setting)
        return None if self.is_nullable and not value else value

    def faults(self, name: str, values: Mapping[str, Any]) -> Iterator[Fault]:
        """Yields a fault for a missing value, a wrong type or an unsupported value."""
        value = values.get(name, self.default)
        null = [type(None)] if self.is_nullable or self.default is None else []
        if value is REQUIRED:
            yield Fault(name, REQUIRED, "", f"add the {self.kind.__name__}")
        elif wrong := [*wrong_type(name, value, self.kind, *null)]:
            yield from wrong
        elif self.names and value not in self.names:
            yield computed_alone(name, value, self.names)


def is_accepted(value: Any, accepted: Iterable[Any]) -> bool:
    """Whether a value is one of the accepted values; 7 is 7.0, but 1 is not True."""
    is_bool = isinstance(value, bool)
    return any(value == x and is_bool == isinstance(x, bool) for x in accepted)


def computed_alone(name: str, value: Any, accepted: Iterable[Any]) -> Fault:
    """Returns the fault of a value beside the accepted values."""
    what = " or ".join(map(repr, accepted))
    return refused(name, value, f"zjax computes {what} alone")
