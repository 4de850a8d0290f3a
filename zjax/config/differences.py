"""Compares the settings of two runs."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zjax.config import convert, derived, schema


class Absent:
    """Value of a setting that a config does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


class Difference(NamedTuple):
    """A setting whose values differ in two configs."""

    setting: str
    """Dotted path, such as `optimizer.groups[0].weight_decay`."""
    value: Any
    """Value in the first config, or `ABSENT`."""
    other: Any
    """Value in the second config, or `ABSENT`."""


def differences(
    config: schema.Config | Mapping[str, Any], other: schema.Config | Mapping[str, Any]
) -> tuple[Difference, ...]:
    """Compares two configs setting by setting, in the order of the first.

    A config may be a nested mapping, such as one read from JSON, where tuples are
    lists, and come from another version of zjax.

    Example:
        >>> differences(schema.Config(seed=1), schema.Config())
        (Difference(setting='seed', value=1, other=0),)
    """
    return tuple(_differences("", _plain(config), _plain(other)))


def _plain(config: schema.Config | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    return convert.to_mapping(derived.without_unused(config))


def _differences(path: str, value: Any, other: Any) -> Iterator[Difference]:
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*value, *other]):
            inner = f"{path}.{name}" if path else name
            entries = value.get(name, ABSENT), other.get(name, ABSENT)
            yield from _differences(inner, *entries)
    elif _holds_sections(value) and _holds_sections(other) and len(value) == len(other):
        for index, entries in enumerate(zip(value, other, strict=True)):
            yield from _differences(f"{path}[{index}]", *entries)
    elif _without_lists(value) != _without_lists(other):
        yield Difference(path, value, other)


def _holds_sections(value: Any) -> bool:
    is_sequence = isinstance(value, list | tuple)
    return is_sequence and all(isinstance(entry, Mapping) for entry in value)


def _without_lists(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
