"""Converts mappings, overrides and function names to a Config, with strict types."""

import ast
import dataclasses
import difflib
import functools
import importlib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ml_collections

from zjax import files
from zjax.errors import ConfigError, Problem
from zjax.settings import axes, choices, derived, renamed, schema
from zjax.settings.choices import KIND, NONE

Section = TypeVar("Section")

_MAX_ENTRIES = 10_000
"""Largest number of entries of a list-valued setting."""


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

    Example:
        >>> base().zero.stage
        1
    """
    config = _changeable(schema.Config(), schema.Config)
    for path in renamed.SECTIONS:
        section, _, name = path.rpartition(".")
        operator.attrgetter(section)(config)[name] = Settings(type_safe=False)
    return config


def _changeable(section: Any, hint: Any) -> Settings:
    """Settings of a section, or of a choice between sections, for a config file."""
    kinds = choices.kinds(hint)
    settings = (_Chosen if kinds else Settings)(type_safe=False)
    # A ConfigDict takes attributes for settings.
    object.__setattr__(settings, "_inner", _sections_inside(kinds))
    values = {} if section is None else to_mapping(section)
    hints = {} if section is None else _hints(type(section))
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
        for name, hint in _hints(one).items()
        if choices.sections(hint)
    }


def from_mapping(section: type[Section], values: Mapping[str, Any]) -> Section:
    """Builds a section of the schema from plain values, or raises all problems at once.

    An int is accepted for a float; otherwise types must match exactly. Nested sections
    may be mappings or instances.

    Example:
        >>> from_mapping(schema.Zero, {"stage": 3}).stage
        3
        >>> from_mapping(schema.Zero, {"stagee": 1})
        Traceback (most recent call last):
        zjax.errors.ConfigError: stagee=1 is not a setting; did you mean stage?
    """
    problems: list[Problem] = []
    values = with_present_names(values) if section is schema.Config else values
    built = _section(section, values, "", problems)
    if problems:
        raise ConfigError(*problems)
    return built


_NO_EFFECT = "has no effect with"
"""How the problem of a setting that a choice does not read begins."""


def unread(values: Mapping[str, Any]) -> list[Problem]:
    """Problems of changed settings that the choices of a config do not read.

    Example:
        >>> print(*unread({"optimizer": {"rule": {"kind": "sgd", "b2": 0.5}}}))
        optimizer.rule.b2=0.5 has no effect with optimizer.rule='sgd'; leave it out, \
or set optimizer.rule to 'adamw' or 'adam' or 'lamb' or 'lion' or 'muon' or \
'onebit_adam' or 'onebit_lamb' or 'zero_one_adam'
    """
    problems: list[Problem] = []
    _section(schema.Config, values, "", problems)
    return [x for x in problems if x.problem.startswith(_NO_EFFECT)]


def to_mapping(section: Any) -> dict[str, Any]:
    """Converts a section to nested dicts, the inverse of `from_mapping`.

    Tuples stay tuples, and derived values stay marked.

    Example:
        >>> to_mapping(schema.Optimizer())["schedule"]["kind"]
        'cosine'
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


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a saved run by present names, without settings that nothing reads.

    Example:
        >>> current({"optimizer": {"name": "sgd", "b2": 0.95}})
        {'optimizer': {'rule': {'kind': 'sgd'}}}
    """
    return _readable(schema.Config, with_present_names(values))


def _readable(section: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies nested settings of a section without settings of choices not taken."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        hint = _hints(section).get(name)
        if (kinds := choices.kinds(hint)) and isinstance(value, Mapping):
            default = choices.default_of(section, name)
            kind = value.get(KIND) or _implied(kinds, value, default)
            hint, known = kinds.get(kind), _all_settings_of(kinds)
            unread = {*known} - {*_settings_of(hint)}
            value = {n: x for n, x in value.items() if n not in unread}
            value = value if hint else None
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            value = _readable(hint, value)
        if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
            entry = typing.get_args(hint)[0]
            is_section = dataclasses.is_dataclass(entry)
            value = [_readable(entry, x) for x in value] if is_section else value
        result[name] = value
    return result


def expand_auto(path: str, value: Any) -> Any:
    """Sizes that `mesh="auto"` stands for; other values pass unchanged.

    Example:
        >>> expand_auto("mesh", "auto")
        {'pipeline': 0, 'sequence': 0, 'tensor': 0}
    """
    is_auto = (path, value) == ("mesh", axes.AUTO)
    return dict.fromkeys(axes.OPEN_AXES, 0) if is_auto else value


def type_of(path: str) -> Any:
    """Type annotation of a setting, such as `zero.stage`; None for an unknown setting.

    Example:
        >>> type_of("optimizer.clip_norm")
        <class 'float'>
    """
    hint: Any = schema.Config
    for name in path.split("."):
        if name == KIND and choices.kinds(hint):
            return str
        hint = _hint_inside(hint, name)
    return hint


def _hint_inside(hint: Any, name: str) -> Any:
    """Type annotation of a setting of a section, or of a choice; None if unknown."""
    found = (_hints(one).get(name) for one in choices.sections(hint))
    return next(filter(None, found), None)


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    """Type annotations of the settings of a section."""
    return typing.get_type_hints(section)


def _section(section: Any, values: Any, path: str, problems: list[Problem]) -> Any:
    """Builds a section from a mapping or instance; appends problems."""
    values, hints = expand_auto(path, _fields(values, section)), _hints(section)
    if not isinstance(values, Mapping):
        word = f"{axes.AUTO!r}, or " if section is schema.Mesh else ""
        expected = f"{word}a mapping with any of {', '.join(hints)}"
        _refuse_type(path, values, expected, problems)
        return values
    arguments, before = {}, len(problems)
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for name, value in values.items():
        field = f"{path}.{name}" if path else f"{name}"
        hint = hints.get(name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            # A mapping changes the default of this field, not of the section's class.
            value = _special_defaults(defaults[name]) | dict(value)
        if name in hints:
            default = defaults[name]
            arguments[name] = _value(hints[name], value, field, problems, default)
        else:
            remedy = _nearest(f"{name}", list(hints), path)
            problems.append(Problem(field, value, "is not a setting", remedy))
    # A section of wrong types could fail in `__post_init__`.
    return section(**arguments) if len(problems) == before else section()


def _fields(value: Any, section: type) -> Any:
    """Settings of an instance of a section; other values pass unchanged."""
    if not isinstance(value, section):
        return value
    return {name: getattr(value, name) for name in choices.names(section)}


def _choose(
    hint: Any, value: Any, path: str, problems: list[Problem], default: Any
) -> Any:
    """Converts a choice between sections; appends what the choice does not read."""
    kinds = choices.kinds(hint)
    given = choices.as_mapping(value)
    if type(value) in kinds.values():
        given = {KIND: choices.kind_of(type(value)), **_fields(value, type(value))}
    if not isinstance(given, Mapping):
        expected = f"one of {', '.join(kinds)}, or a mapping with a {KIND}"
        _refuse_type(path, value, expected, problems)
        return default
    given = dict(given)
    kind = given.pop(KIND, None) or _implied(kinds, given, default)
    if kind not in kinds:
        remedy = f"use one of {', '.join(kinds)}"
        problems.append(Problem(path, kind, "is not a choice", remedy))
        return default
    section, known = kinds[kind], _all_settings_of(kinds)
    special = {} if default is None else _special_defaults(default)
    unread = {*known} - {*_settings_of(section)}
    for name in [name for name in given if name in unread]:
        x, field = given.pop(name), f"{path}.{name}"
        if derived.reset(x) not in (special.get(name), renamed.UNREAD.get(field)):
            problems += _unread(kinds, kind, field, x)
    if section is None:
        for name, x in given.items():
            problem, remedy = "is not a setting", _nearest(name, known, path)
            problems.append(Problem(f"{path}.{name}", x, problem, remedy))
        return None
    given = {n: x for n, x in special.items() if n in _settings_of(section)} | given
    return _section(section, given, path, problems)


def _unread(
    kinds: Mapping[str, type | None], kind: str, path: str, value: Any
) -> Iterator[Problem]:
    """Yields problems of a changed setting that a choice does not read."""
    choice, _, name = path.rpartition(".")
    readers = choices.readers(kinds, name)
    reader = typing.cast(type, kinds[readers[0]])
    default = choices.default_of(reader, name)
    for field, x in _changed(_hints(reader)[name], value, default, path):
        problem = f"{_NO_EFFECT} {choice}={None if kind == NONE else kind!r}"
        remedy = f"leave it out, or set {choice} to {' or '.join(map(repr, readers))}"
        yield Problem(field, x, problem, remedy)


def _settings_of(section: type | None) -> list[str]:
    """Names of the settings of a section; none of None."""
    return choices.names(section) if section else []


def _all_settings_of(kinds: Mapping[str, type | None]) -> list[str]:
    """Names of the settings of all sections of a choice."""
    return sorted({name for one in kinds.values() for name in _settings_of(one)})


def _implied(kinds: Mapping[str, Any], given: Mapping[str, Any], default: Any) -> str:
    """Kind of a choice that names none: the default, or the usual or only section."""
    if default is not None:
        return choices.kind_of(type(default))
    sections = {kind: one for kind, one in kinds.items() if one}
    usual = [kind for kind, one in sections.items() if getattr(one, "is_usual", False)]
    usual += sections if len(sections) == 1 else []
    return usual[0] if given and usual else NONE


def _changed(hint: Any, value: Any, default: Any, path: str) -> list[tuple[str, Any]]:
    """Path and value of each setting in a value that is not the default."""
    problems: list[Problem] = []
    converted = _value(hint, value, path, problems, default)
    if not problems and converted == default:
        return []
    if isinstance(value, Mapping):
        inside = [(f"{path}.{name}", x) for name, x in value.items() if name != KIND]
        return inside or [(path, value.get(KIND))]
    return [(path, value if problems else converted)]


def _special_defaults(section: Any) -> dict[str, Any]:
    """Settings with another default in this section than in the section's class."""
    usual = type(section)()
    values = _fields(section, type(section))
    return {n: x for n, x in values.items() if x != getattr(usual, n)}


def _nearest(name: str, known: list[str], path: str) -> str:
    """Remedy that names the most similar setting, or lists all."""
    matches = difflib.get_close_matches(name, known, n=1)
    if matches:
        return f"did you mean {path}{'.' if path else ''}{matches[0]}?"
    return f"use one of {', '.join(known)}"


def _value(
    hint: Any, value: Any, field: str, problems: list[Problem], default: Any = None
) -> Any:
    """Converts a value to the annotated type; appends a problem if it does not fit."""
    # Derived values are derived anew, from the settings of this config.
    value = derived.reset(value)
    if choices.kinds(hint):
        return _choose(hint, value, field, problems, default)
    if dataclasses.is_dataclass(hint):
        return _section(hint, value, field, problems)
    if typing.get_origin(hint) is typing.Literal:
        return _choice(typing.get_args(hint), value, field, problems)
    if hint is schema.NameTable:
        return _names(value, field, problems)
    if isinstance(hint, types.UnionType):
        one, many = typing.get_args(hint)
        is_tuple = isinstance(value, list | tuple)
        return _value(many if is_tuple else one, value, field, problems)
    if typing.get_origin(hint) is tuple:
        return _tuple(typing.get_args(hint)[0], value, field, problems)
    if hint is float and type(value) is int:
        # `type(value) is int` excludes bool, which is a subclass of int.
        return float(value)
    is_marked = derived.is_offered(value) or derived.is_recipe(value)
    if type(value) is not hint and not (is_marked and isinstance(value, hint)):
        expected = "bool: True or False" if hint is bool else hint.__name__
        _refuse_type(field, value, expected, problems)
    elif hint is float and math.isnan(value):
        problems.append(Problem(field, value, "is not a number", "use a number"))
    elif (setting := re.sub(r"\[\d+\]", "", field)) in files.SETTINGS:
        return _path(value, field, setting, problems)
    return value


def _path(value: str, field: str, setting: str, problems: list[Problem]) -> str:
    """Expands a local path; appends a problem if the path is unusable."""
    if not value and setting in (*files.OPTIONAL, *files.CHECKED_LATER):
        return value
    try:
        return files.local_path(field, value)
    except ConfigError as error:
        problems += error.problems
        return value


def _choice(
    choices: tuple[Any, ...], value: Any, field: str, problems: list[Problem]
) -> Any:
    """Checks a value against the choices of a Literal."""
    # Types are compared as well: True == 1, but zero.stage=True is refused.
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        remedy = f"use one of {', '.join(str(x) or repr(x) for x in choices)}"
        problems.append(Problem(field, value, "is not a choice", remedy))
    return value


def _tuple(hint: Any, value: Any, field: str, problems: list[Problem]) -> Any:
    """Converts each entry of a list, up to `_MAX_ENTRIES`."""
    if not isinstance(value, list | tuple):
        _refuse_type(field, value, "list or tuple", problems)
        return value
    if len(value) > _MAX_ENTRIES:
        problem, remedy = (
            f"has {len(value):,} entries",
            f"use at most {_MAX_ENTRIES:,}",
        )
        problems.append(Problem(field, "...", problem, remedy))
        return ()
    entries = enumerate(map(derived.as_set, value))
    return tuple(_value(hint, v, f"{field}[{i}]", problems) for i, v in entries)


def _names(value: Any, field: str, problems: list[Problem]) -> Any:
    """Converts a mapping of names to a hashable `NameTable`."""
    if isinstance(value, schema.NameTable):
        return value
    if not isinstance(value, Mapping):
        _refuse_type(field, value, "a mapping of names to names", problems)
        return value
    for name, meaning in value.items():
        entry = f"{field}[{name!r}]"
        if not isinstance(name, str):
            problem, remedy = "has a key that is not a str", "use names of dims as keys"
            problems.append(Problem(entry, meaning, problem, remedy))
        elif not isinstance(meaning, str):
            expected = "str, or '' for a dim that is not split"
            _refuse_type(entry, meaning, expected, problems)
    return schema.NameTable(sorted(value.items(), key=str))


def _refuse_type(
    field: str, value: Any, expected: str, problems: list[Problem]
) -> None:
    """Appends the problem of a value of the wrong type."""
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    problems.append(
        Problem(field, value, f"is {article} {kind}", f"expected {expected}")
    )


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
    """Imports a function by the name `module:function`, or returns the fault.

    Example:
        >>> find_function("math:fsum")([1, 2])
        3.0
        >>> find_function("math:nothing").problem
        'names no function'
    """
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
    return path, _parse_value(type_of(path), value.strip())


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings, or dotted paths, into nested settings; changes win.

    A choice by kind alone keeps the settings of the choice, None drops them, and a
    setting inside a choice of None makes the choice anew. Old names are replaced.

    Example:
        >>> merge({"zero": {"stage": 1}}, {"zero.stage": 3, "seed": 2})
        {'zero': {'stage': 3}, 'seed': 2}
    """
    kept, moved = renamed.moved(changes)
    return _with_moved(_merge(values, kept, schema.Config), moved)


def with_present_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Moves settings under old names to their present places."""
    return _with_moved(*renamed.moved(values))


def _with_moved(values: Mapping[str, Any], moved: Mapping[str, Any]) -> dict[str, Any]:
    """Merges settings that had old names, unless they are defaults of a section off."""
    needed = {p: x for p, x in moved.items() if not _is_default_of_off(values, p, x)}
    return _merge(values, needed, schema.Config)


def _is_default_of_off(values: Mapping[str, Any], path: str, value: Any) -> bool:
    """Whether a setting has the default of a section that nested settings lack."""
    section, _, name = path.rpartition(".")
    kinds = choices.kinds(type_of(section))
    given: Any = values
    for part in section.split("."):
        is_mapping = isinstance(given, Mapping)
        given = given.get(part) if is_mapping else getattr(given, part, None)
    if NONE not in kinds or choices.as_mapping(given) != choices.OFF:
        return False
    reader = kinds[choices.readers(kinds, name)[0]]
    return value == choices.default_of(reader, name)


def _merge(
    values: Mapping[str, Any], changes: Mapping[str, Any], section: Any
) -> dict[str, Any]:
    """Merges nested settings of a section, or of a choice between sections."""
    merged = dict(values)
    for path, change in changes.items():
        name, _, rest = path.partition(".")
        change = {rest: change} if rest else change
        hint = _hint_inside(section, name)
        is_choice = bool(choices.kinds(hint))
        change = choices.as_mapping(change) if is_choice else change
        if is_choice and change == choices.OFF:
            merged[name] = None
        elif isinstance(change, Mapping):
            before = expand_auto(name, merged.get(name, {}))
            before = choices.as_mapping(before) if is_choice else before
            before = {} if is_choice and before == choices.OFF else before
            merged[name] = _merge(_nested(before), change, hint)
        else:
            merged[name] = derived.as_set(change)
    return merged


def merge_overrides(
    values: Mapping[str, Any], overrides: Sequence[str | Mapping[str, Any]]
) -> dict[str, Any]:
    """Merges overrides (`zero.stage=3`, or mappings) into settings; the last wins.

    Example:
        >>> merge_overrides({}, ["seed=1", "seed=2"])
        {'seed': 2}
    """
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
