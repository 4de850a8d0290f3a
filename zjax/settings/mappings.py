"""Settings as nested mappings, and changes to them by files, flags and overrides."""

import ast
import dataclasses
import operator
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from zjax.errors import ConfigError, Problem
from zjax.settings import axes, choices, derived, renamed, schema
from zjax.settings.choices import KIND


class Settings(ml_collections.ConfigDict):
    """Settings that a config file changes; a choice may be set by kind alone.

    Example:
        >>> config = base()
        >>> config.optimizer.schedule = "wsd"
        >>> config.optimizer.schedule.decay_fraction = 0.1
        >>> config.optimizer.schedule.kind
        'wsd'
    """

    _inner: Mapping[str, tuple[Any, Any]] = {}
    """Default and annotation of each section inside the sections of a choice."""

    def __setitem__(self, key: str, value: Any) -> None:
        is_known = key in self or key in self._inner
        before = self[key] if is_known and isinstance(value, str | None) else None
        if isinstance(before, _Chosen):
            given = choices.as_mapping(value)
            if given == choices.OFF:
                # None drops the settings of the section that was chosen before.
                for name in list(before):
                    del before[name]
            before.update(given)
            value = before
        super().__setitem__(key, value)


class _Chosen(Settings):
    """Settings of a choice, which is empty if the choice is None.

    A section inside is made when a file reaches into it.
    """

    def __getitem__(self, key: str) -> Any:
        if key in self._inner and key not in self:
            super().__setitem__(key, _changeable(*self._inner[key]))
        return super().__getitem__(key)


def base() -> ml_collections.ConfigDict:
    """All settings at defaults, as a ConfigDict for a config file to change.

    Types are not enforced while the file runs: `from_mapping` reports every mistake at
    once.
    """
    config = _changeable(schema.Config(), schema.Config)
    for path, new in renamed.SECTIONS.items():
        section, _, name = path.rpartition(".")
        operator.attrgetter(section)(config)[name] = _changeable(None, type_of(new))
    return config


def _changeable(section: Any, hint: Any) -> Settings:
    """Settings of a section, or of a choice between sections, for a config file."""
    kinds = choices.kinds(hint)
    settings = (_Chosen if kinds else Settings)(type_safe=False)
    # A ConfigDict takes attributes for settings.
    object.__setattr__(settings, "_inner", _sections_inside(kinds))
    values = {} if section is None else to_mapping(section)
    hints = {} if section is None else choices.hints(type(section))
    for name, value in values.items():
        inner = hints.get(name)
        is_section = bool(choices.sections(inner))
        value = _changeable(getattr(section, name), inner) if is_section else value
        settings[name] = value
    return settings


def _sections_inside(
    kinds: Mapping[str, type | None],
) -> dict[str, tuple[Any, Any]]:
    """Default and annotation of each section inside the sections of a choice."""
    return {
        name: (choices.default_of(one, name), hint)
        for one in kinds.values()
        if one
        for name, hint in choices.hints(one).items()
        if choices.sections(hint)
    }


def to_mapping(section: Any) -> dict[str, Any]:
    """Converts a section to nested dicts, the inverse of `from_mapping`.

    Tuples stay tuples, and derived values stay marked.
    """
    kind = {KIND: section.kind} if isinstance(section, choices.Choice) else {}
    return kind | {
        name: _plain(getattr(section, name)) for name in choices.names(type(section))
    }


def _plain(value: Any) -> Any:
    """Value of a setting without sections and name tables."""
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, schema.NameTable):
        return dict(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


PREFIX = "config."
"""Optional prefix of a path, which makes flags, bindings and overrides alike."""


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `path=value`, drops `config.`, and parses the value.

    The value is a Python literal. A string may lack quotes, a list may lack brackets:
    `a,b` is a list of two where a list is expected. A float may be `inf`.

    Example:
        >>> parse_override("config.directory=runs/a"), parse_override("zero.stage=3")
        (('directory', 'runs/a'), ('zero.stage', 3))
        >>> parse_override("observe.sinks=console,csv")
        ('observe.sinks', ('console', 'csv'))
    """
    path, equals, value = text.partition("=")
    path = path.strip().removeprefix(PREFIX)
    if not equals or not path:
        remedy = "write path=value, such as zero.stage=3"
        raise ConfigError(Problem("override", text, "is not a setting", remedy))
    new = renamed.place(path)
    hint = bool if True in new.values else type_of(new.path)
    return path, _parse_value(hint, value.strip())


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings, or dotted paths, into nested settings; changes win.

    A choice by kind alone keeps the settings of the choice, None drops them, and a
    setting inside a choice of None makes the choice anew. Old names stay. The
    later of an old and a present name replaces the earlier.

    Example:
        >>> merge({"zero": {"stage": 1}}, {"zero.stage": 3, "seed": 2})
        {'zero': {'stage': 3}, 'seed': 2}
    """
    return _merge(_without_replaced(values, changes), changes, "")


def _without_replaced(
    values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies nested settings without settings that changes have by another name."""
    new, olds = renamed.find(changes)
    kept = dict(values)
    for old in olds:
        is_choice = bool(choices.kinds(type_of(old.path)))
        path = f"{old.path}.{KIND}" if is_choice and old.present else old.path
        kept = _without(kept, path, turns_on=is_choice or old.path in renamed.SWITCHES)
    _, before = renamed.find(kept)
    replaced = [
        old
        for path, value in leaves(new)
        for old in before
        if _replaces(path, value, old)
    ]
    if any(old.name == renamed.MEMORY for old in replaced):
        kept = renamed.without_presets(kept)
        return _without_replaced(kept, changes)
    for old in replaced:
        kept = _without(kept, old.name)
    return kept


def leaves(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yields paths and values of nested settings; a kind has the path of its choice."""
    for name, value in values.items():
        path = f"{section}{name}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")
        else:
            choice = path.removesuffix(f".{KIND}")
            is_kind = path != choice and bool(choices.kinds(type_of(choice)))
            yield (choice if is_kind else path), value


def _replaces(path: str, value: Any, old: renamed.Old) -> bool:
    """Whether a setting under a present name replaces one under an old name."""
    is_all = not isinstance(value, str) or choices.as_mapping(value) == choices.OFF
    is_inside = is_all and old.path.startswith(f"{path}.")
    turns_on = old.present is None and path.startswith(f"{old.path}.")
    return old.path == path or is_inside or turns_on


def _without(
    values: Mapping[str, Any], path: str, *, turns_on: bool = False
) -> dict[str, Any]:
    """Copies nested settings without one, and without a None that `turns_on` ends."""
    name, _, rest = path.partition(".")
    if path in values or name not in values:
        return {n: x for n, x in values.items() if n != path}
    inner = values[name]
    is_kind = rest == KIND and isinstance(inner, str)
    if is_kind or (inner is None and turns_on):
        return {n: x for n, x in values.items() if n != name}
    if isinstance(inner, Mapping) or dataclasses.is_dataclass(inner):
        inner = _without(_nested(inner), rest, turns_on=turns_on)
    return {**values, name: inner}


def _merge(
    values: Mapping[str, Any], changes: Mapping[str, Any], section: str
) -> dict[str, Any]:
    """Merges nested settings of a section, or of a choice between sections."""
    merged = dict(values)
    for key, change in changes.items():
        name, _, rest = f"{key}".partition(".")
        path = f"{section}{name}"
        change = {rest: change} if rest else change
        is_choice = bool(choices.kinds(type_of(renamed.SECTIONS.get(path, path))))
        change = choices.as_mapping(change) if is_choice else change
        if is_choice and change == choices.OFF:
            merged[name] = None
        elif isinstance(change, Mapping):
            before = expand_auto(name, merged.get(name, {}))
            before = choices.as_mapping(before) if is_choice else before
            before = {} if is_choice and before == choices.OFF else before
            merged[name] = _merge(_nested(before), change, f"{path}.")
        else:
            merged[name] = derived.as_set(change)
    return merged


def merge_overrides(
    values: Mapping[str, Any], overrides: Sequence[str | Mapping[str, Any]]
) -> dict[str, Any]:
    """Merges overrides (`zero.stage=3`, or mappings) into settings; the last wins."""
    merged, problems = dict(values), []
    for override in overrides:
        try:
            changes = (
                dict([parse_override(override)])
                if isinstance(override, str)
                else override
            )
        except ConfigError as error:
            problems += error.problems
        else:
            merged = merge(merged, changes)
    if problems:
        raise ConfigError(*problems)
    return merged


def _nested(value: Any) -> Mapping[str, Any]:
    """Settings of a section as a mapping; empty for a value that is no section."""
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    return value if isinstance(value, Mapping) else {}


def expand_auto(path: str, value: Any) -> Any:
    """Sizes that `mesh="auto"` stands for; other values pass unchanged.

    Example:
        >>> expand_auto("mesh", "auto")
        {'pipeline': 0, 'sequence': 0, 'tensor': 0}
    """
    is_auto = (path, value) == ("mesh", axes.AUTO)
    return dict.fromkeys(axes.OPEN_AXES, 0) if is_auto else value


def type_of(path: str) -> Any:
    """Type annotation of a setting such as `zero.stage`; None if unknown."""
    hint: Any = schema.Config
    for name in path.split("."):
        if name == KIND and choices.kinds(hint):
            return str
        hint = _hint_inside(hint, name)
    return hint


def _hint_inside(hint: Any, name: str) -> Any:
    """Type annotation of a setting of a section, or of a choice; None if unknown."""
    found = (choices.hints(one).get(name) for one in choices.sections(hint))
    return next(filter(None, found), None)


def _parse_value(hint: Any, text: str) -> Any:
    """Parses text as a Python literal if the annotated type allows."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = text
    if _is_text(hint) and not isinstance(value, str):
        return text
    if typing.get_origin(hint) is tuple:
        return _parse_list(typing.get_args(hint)[0], value, text)
    if hint is bool and value in ("true", "false"):
        return value == "true"
    if hint is float and value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _is_text(hint: Any) -> bool:
    """Whether a type is str or a choice of strings."""
    is_choice = typing.get_origin(hint) is typing.Literal
    return hint is str or (is_choice and isinstance(typing.get_args(hint)[0], str))


def _parse_list(hint: Any, value: Any, text: str) -> Any:
    """Parses a list that may lack brackets: texts between commas, or one value."""
    if text.startswith(("[", "(")) or dataclasses.is_dataclass(hint):
        return value
    # The literal parser has already split numbers at commas.
    if not _is_text(hint):
        return value if isinstance(value, tuple | str) else (value,)
    entries = value if isinstance(value, tuple) else (value,)
    if text[:1] in ("'", '"') and all(isinstance(entry, str) for entry in entries):
        return entries
    return tuple(map(str.strip, text.split(","))) if text else ()
