"""Which settings of two runs differ."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zjax.config import convert, schema


class Absent:
    """Stands for the value of a setting that one of two configs does not have."""

    def __repr__(self) -> str:
        """As it is shown in a message."""
        return "absent"


ABSENT = Absent()


class Difference(NamedTuple):
    """A setting that two configs have at different values."""

    setting: str
    """Dotted path, such as `optimizer.groups[0].weight_decay`."""
    value: Any
    """In the first config; `ABSENT` where it has no such setting."""
    other: Any
    """In the second config; `ABSENT` where it has no such setting."""


def differences(
    config: schema.Config | Mapping[str, Any], other: schema.Config | Mapping[str, Any]
) -> tuple[Difference, ...]:
    """Compares two configs setting by setting.

    Args:
        config: A Config, or a mapping of nested sections such as `to_mapping` gives,
            also one that was read from JSON, which has lists for tuples.
        other: The same; it may come from another version of zjax.

    Returns:
        What differs, in the order of the settings of `config`.

    Example:
        >>> differences(schema.Config(seed=1), schema.Config())
        (Difference(setting='seed', value=1, other=0),)
    """
    return tuple(_differences("", _plain(config), _plain(other)))


def _plain(config: schema.Config | Mapping[str, Any]) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else convert.to_mapping(config)


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
