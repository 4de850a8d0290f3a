"""Sections of settings, and choices between sections.

The sections that a setting chooses from are a union in the annotation. Each has a kind,
the name of the class in snake case. A setting exists only in sections that read it.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, dataclass_transform

KIND = "kind"
"""Key of a mapping that names the section."""
NONE = "none"
"""Kind of a choice of no section, which is None."""
OFF = {KIND: NONE}
"""Mapping that stands for None."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls):
    """Declares a section: immutable, keyword-only, hashable."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class Choice:
    """Base of a section that is one of several."""

    kind: ClassVar[str]
    is_usual: ClassVar[bool] = False
    """Whether a setting inside turns on this section of an optional choice."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if KIND not in vars(cls):
            cls.kind = _snake_case(cls.__name__)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def kinds(hint: Any) -> dict[str, type | None]:
    """Sections that an annotation chooses from, by kind; empty if it is no choice."""
    if not isinstance(hint, types.UnionType):
        return {}
    members = [None if one is types.NoneType else one for one in typing.get_args(hint)]
    if not any(map(dataclasses.is_dataclass, members)):
        return {}
    return {kind_of(one): one for one in members}


def kind_of(one: type | None) -> str:
    """Kind of a section, or of None."""
    return NONE if one is None else getattr(one, KIND, _snake_case(one.__name__))


def sections(hint: Any) -> tuple[type, ...]:
    """Section classes of an annotation: one, several of a choice, or none."""
    if dataclasses.is_dataclass(hint):
        return (typing.cast(type, hint),)
    return tuple(one for one in kinds(hint).values() if one)


def readers(found: Mapping[str, type | None], name: str) -> list[str]:
    """Kinds of a choice whose section has a setting."""
    return [kind for kind, one in found.items() if one and name in names(one)]


def as_mapping(value: Any) -> Any:
    """Choice by kind alone, None or '', as a mapping; other values pass unchanged."""
    if value is None or isinstance(value, str):
        return {KIND: value or NONE}
    return value


def as_kind(section: Any, kind: type) -> Any:
    """Section of another kind that keeps the settings that both kinds have."""
    shared = {name for name in names(kind) if hasattr(section, name)}
    return kind(**{name: getattr(section, name) for name in shared})


def value_at(section: Any, path: str) -> Any:
    """Value of a setting by path: the kind of a section, None in a section that is off.

    Example:
        >>> from zjax.settings import schema
        >>> optimizer = schema.Optimizer()
        >>> value_at(optimizer, "rule"), value_at(optimizer, "rule.b1")
        ('adamw', 0.9)
    """
    for name in path.split("."):
        section = getattr(section, name, None)
    return kind_of(type(section)) if dataclasses.is_dataclass(section) else section


def names(one: type) -> list[str]:
    """Names of the settings of a section."""
    return [field.name for field in dataclasses.fields(one)]


def default_of(one: Any, name: str) -> Any:
    """Default of a setting of a section."""
    return {field.name: field.default for field in dataclasses.fields(one)}[name]


@functools.cache
def hints(one: type) -> dict[str, Any]:
    """Type annotations of the settings of a section."""
    found = typing.get_type_hints(one)
    return {name: found[name] for name in names(one)}
