"""Two configs compared: their settings by path, and one digest of them all."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.config import convert, schema

ABSENT = "<absent>"
"""Stands for a setting that one of two configs does not have."""


class Difference(NamedTuple):
    """One setting that two configs do not share."""

    setting: str
    """Dotted path, such as `optimizer.b1` or `optimizer.groups[0].pattern`."""
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.setting}: {self.first!r}, {self.second!r}"


def settings_by_path(config: schema.Config | Mapping[str, Any]) -> dict[str, Any]:
    """Lists every setting under its dotted path.

    Args:
        config: A Config, or the nested mapping that JSON gives back of one.

    Returns:
        Plain values; tuples become lists, as in JSON.

    Example:
        >>> settings_by_path(schema.Config())["zero.stage"]
        1
    """
    if isinstance(config, schema.Config):
        config = convert.to_mapping(config)
    return dict(_flatten("", json.loads(json.dumps(config))))


def differences(
    first: schema.Config | Mapping[str, Any], second: schema.Config | Mapping[str, Any]
) -> list[Difference]:
    """Finds the settings in which two configs differ.

    Args:
        first: A Config, or the nested mapping that JSON gives back of one.
        second: The same; a setting that one of them lacks is `ABSENT` there.

    Returns:
        Each setting that differs, in the order of the first config.

    Example:
        >>> print(*differences(schema.Config(), schema.Config(seed=1)))
        seed: 0, 1
    """
    before, after = settings_by_path(first), settings_by_path(second)
    return [
        Difference(path, before.get(path, ABSENT), after.get(path, ABSENT))
        for path in dict.fromkeys([*before, *after])
        if before.get(path, ABSENT) != after.get(path, ABSENT)
    ]


def digest(
    config: schema.Config | Mapping[str, Any], *, without: Collection[str] = ()
) -> str:
    """Sums a config up in one word, equal for equal settings alone.

    Args:
        config: A Config, or the nested mapping that JSON gives back of one.
        without: Dotted paths of settings that may differ.

    Returns:
        64 hexadecimal digits (SHA-256).

    Example:
        >>> one, other = schema.Config(), schema.Config(seed=1)
        >>> digest(one) == digest(other), digest(one, without=["seed"]) == digest(
        ...     other, without=["seed"]
        ... )
        (False, True)
    """
    kept = {k: v for k, v in settings_by_path(config).items() if k not in set(without)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for number, entry in enumerate(value):
            yield from _flatten(f"{path}[{number}]", entry)
    else:
        yield path, value
