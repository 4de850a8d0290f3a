"""Applies a table of sections to a ds_config: each key has one verdict and settings."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, NamedTuple

from zjax.deepspeed.reading import MISSING, coerce, leaves
from zjax.errors import Problem

AUTO = "auto"
_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}
_NAMES |= {str: "a text", list: "a list"}


class Outcome(NamedTuple):
    """Verdict on a key (mapped, derived, not needed, not supported), why, and settings.

    The note of a key that is not supported is the remedy of its problem.
    """

    verdict: str
    note: str
    settings: Mapping[str, Any] = {}
    problem: str = ""


def derived(note: str, settings: Mapping[str, Any] | None = None) -> Outcome:
    """Outcome of a key that becomes settings, or none, for a reason."""
    shown = [f"{name}={value!r}" for name, value in (settings or {}).items()]
    text = "; ".join(filter(None, (", ".join(shown), note)))
    return Outcome("derived" if note else "mapped", text, settings or {})


def refusal(remedy: str, problem: str = "is not supported") -> Outcome:
    """Outcome of a key that is refused, or of a missing key that is required."""
    return Outcome("not supported", remedy, problem=problem)


Meaning = Outcome | Mapping[str, Any] | str | None
"""Outcome of a key; settings alone; the reason why zjax does not need it; or none."""
Meanings = dict[str, Meaning]
"""Meanings by key of a section; "" is the section itself, "*" are further keys."""


class To(NamedTuple):
    """Key that becomes one setting, by value or by DeepSpeed's default."""

    default: Any
    setting: str
    # Kinds of the section that read the key; none for all.
    of: Sequence[str] = ()
    # Smallest number that becomes the setting, and the reason why less does not.
    least: int | None = None
    why: str | None = None


class If(NamedTuple):
    """Switch or number with a meaning unless it is off or 0."""

    on: Meaning
    why: Meaning = "it is off"
    default: Any = False
    of: Sequence[str] = ()


class No(NamedTuple):
    """Key with one meaning for all values; numbers are 0 or more, fractions up to 1."""

    why: Meaning
    default: Any = None


@dataclasses.dataclass(frozen=True)
class Section:
    """Table of a section of a ds_config."""

    # Dotted path; "" for the outermost object.
    path: str
    # Rows of keys, or defaults of DeepSpeed, or functions that find defaults, for keys
    # that `read` knows. The type of a default is the type of the key; None is any.
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Finds the meanings of keys, or the reason why the section is not read.
    read: Callable[["Values"], Meanings | str] = lambda values: {}
    _: dataclasses.KW_ONLY
    # Reason why no key is read while the row `enabled` is off.
    off: str = "its section is off"
    # Meaning of further keys.
    rest: Meaning = None
    # Finds the kind that `To.of` names.
    kind: Callable[["Values"], str] = lambda values: ""
    # Whether DeepSpeed checks names and types even if the section is off.
    is_strict: bool = False
    # Values that DeepSpeed takes in place of an object.
    instead: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of a section: `values[name]` is the value of a key, or the default."""

    found: "Conversion"
    path: str

    def __getitem__(self, name: str) -> Any:
        return self.found[_join(self.path, name)]

    def given(self, name: str) -> bool:
        """Whether the file has a key."""
        return self.found.given(_join(self.path, name))

    def is_auto(self, name: str) -> bool:
        """Whether the run fills a key."""
        return self.found.is_auto(_join(self.path, name))


class Row(NamedTuple):
    """Verdict on one key, with the value in the file or DeepSpeed's default."""

    key: str
    value: Any
    verdict: str
    note: str
    is_default: bool = False


class Conversion:
    """Settings equivalent to a ds_config, and a row for each key.

    `found[path]` is the value of a key as DeepSpeed coerces it, or the default if the
    key is missing, null, "auto" or of a wrong type, which is a problem.
    """

    def __init__(self, values: Mapping[str, Any], table: Sequence[Section]):
        self._given = leaves(values)
        self.settings = dict[str, Any]()
        """Values by path of the zjax setting."""
        self._rows = dict[str, Row]()
        self._faults = dict[str, Problem]()
        self._needs = list[Problem]()
        self._defaults = dict[str, Any]()
        self._known = dict[str, list[str]]({"": []})
        for section in table:
            known = self._known.setdefault(section.path, [])
            known += [name.partition(".")[0] for name in section.keys]
            for name, default in section.keys.items():
                self._defaults[_join(section.path, name)] = default
            parent, _, name = section.path.rpartition(".")
            self._known.setdefault(parent, []).append(name)
        self._check_objects(table)
        for section in table:
            self._convert(section)
        self._refuse_unread()

    @property
    def rows(self) -> list[Row]:
        """Rows of the keys in the order of the file, then of defaults that matter."""
        given = [self._rows[path] for path in self._given]
        return given + [row for row in self._rows.values() if row.is_default]

    def problems(self) -> list[Problem]:
        """Problems of unsupported, unknown or mistyped keys, and of missing keys."""
        found = [self._faults[path] for path in self._given if path in self._faults]
        return found + self._needs

    def __getitem__(self, path: str) -> Any:
        return self.value(path, self._default(path))

    def value(self, path: str, default: Any) -> Any:
        """Value of a key as DeepSpeed coerces it to the type of the default."""
        value, kind = self._given.get(path), type(default)
        if value is None or value in ({}, AUTO):
            return default
        if default is None:
            return value
        if (coerced := coerce(value, kind)) is MISSING:
            name = _NAMES[kind]
            self._refuse(path, refusal(f"write {name}", f"is not {name}"))
            return default
        return coerced

    def _default(self, path: str) -> Any:
        """DeepSpeed's value of a missing key."""
        default = self._defaults[path]
        default = default.default if isinstance(default, To | If | No) else default
        return default(Values(self, "")) if callable(default) else default

    def given(self, path: str) -> bool:
        """Whether the file has a key or section."""
        return any(x == path or x.startswith(f"{path}.") for x in self._given)

    def holds(self, path: str) -> bool:
        """Whether the file has a key, with a value that is not null."""
        return self.value(path, None) is not None

    def is_auto(self, path: str) -> bool:
        """Whether the run fills a key."""
        return self._given.get(path) == AUTO

    def is_faulty(self, path: str) -> bool:
        """Whether a key was refused."""
        return path in self._faults

    def inside(self, section: str) -> list[str]:
        """Keys of the file in a section that have no row yet."""
        given = [path for path in self._given if path.startswith(f"{section}.")]
        return [path for path in given if path not in self._rows]

    def need(self, path: str, problem: str, remedy: str) -> None:
        """Refuses a file for a key that is missing or conflicts with another key."""
        inside = [x for x in self._given if x.startswith(f"{path}.")]
        value = f"{len(inside)} keys" if inside else self._given.get(path)
        self._needs.append(Problem(path, value, problem, remedy))

    def _record(self, path: str, meaning: Meaning) -> None:
        """Adds the row of a key of the file; the first verdict counts."""
        if meaning is None or path in self._rows or path not in self._given:
            return
        outcome = _outcome(meaning)
        if outcome.problem:
            self._refuse(path, outcome)
        if fault := self._faults.get(path):
            outcome = refusal(fault.remedy)
        self._rows[path] = Row(path, self._given[path], outcome.verdict, outcome.note)

    def _refuse(self, path: str, outcome: Outcome) -> None:
        """Adds the problem of a key; the first problem is reported."""
        fault = Problem(path, self._given[path], outcome.problem, outcome.note)
        self._faults.setdefault(path, fault)

    def _check_objects(self, table: Sequence[Section]) -> None:
        """Refuses values in place of sections, except values that DeepSpeed allows."""
        allowed = {section.path: section.instead for section in table}
        for path in self._defaults:
            while (path := path.rpartition(".")[0]) and path not in self._defaults:
                allowed.setdefault(path, ())
        for path, values in allowed.items():
            value = self._given.get(path, {})
            if value != {} and value not in values:
                remedy = "write an object, or leave it out"
                self._record(path, refusal(remedy, "is not an object"))

    def _convert(self, section: Section) -> None:
        """Adds rows and settings of the keys of a section."""
        for path in self.inside(section.path) if section.is_strict else ():
            name = path[len(section.path) + 1 :].partition(".")[0]
            if name not in self._known[section.path]:
                self._refuse_unknown(path)
            elif path in self._defaults:
                self[path]  # refuses a wrong type
        values = Values(self, section.path)
        is_switched = isinstance(section.keys.get("enabled"), If)
        is_off = is_switched and not values["enabled"]
        found = section.off if is_off else section.read(values)
        meanings = {} if isinstance(found, str) else self._rows_of(section) | found
        rest = found if isinstance(found, str) else meanings.pop("*", section.rest)
        for name, meaning in meanings.items():
            path = _join(section.path, name)
            if meaning is not None or self.is_auto(path):
                self._judge(path, meaning or AS_THE_RUN)
        for name, key in section.keys.items():
            if isinstance(key, No):
                path = _join(section.path, name)
                self._record(path, self._out_of_range(path) or key.why)
        for path in self.inside(section.path) if rest else ():
            is_open = self.is_auto(path) and path.endswith(".enabled")
            self._record(path, AS_THE_RUN if is_open else rest)

    def _out_of_range(self, path: str) -> Outcome | None:
        """Refusal of a negative number, or of a fraction above 1, of a typed key."""
        number = None if self._default(path) is None else self[path]
        if type(number) is int and number < 0:
            return refusal("use 0 or more", "is out of range")
        is_outside = type(number) is float and not 0 <= number <= 1
        return refusal("use 0 to 1", "is out of range") if is_outside else None

    def _rows_of(self, section: Section) -> Meanings:
        """Meanings of keys that need no function."""
        values, meanings = Values(self, section.path), Meanings()
        kind = section.kind(values)
        for name, key in section.keys.items():
            if not isinstance(key, To | If) or (key.of and kind not in key.of):
                continue
            value = values[name]
            if isinstance(key, If):
                meanings[name] = key.on if value else key.why
            elif key.least is None or value >= key.least:
                value = tuple(value) if isinstance(value, list) else value
                meanings[name] = {key.setting: value}
            elif not self.holds(_join(section.path, name)) or (key.why and value >= 0):
                meanings[name] = key.why
            else:
                remedy = f"use {0 if key.why else key.least} or more"
                meanings[name] = refusal(remedy, "is out of range")
        return meanings

    def _judge(self, path: str, meaning: Meaning) -> None:
        """Adds the row and settings of a key that is read."""
        outcome = _outcome(meaning)
        if path in self._defaults:
            self[path]  # refuses a wrong type
        if self.is_auto(path) and meaning is not outcome:
            outcome = AS_THE_RUN
        self.settings |= outcome.settings
        if path in self._given:
            self._record(path, outcome)
        elif outcome.problem:
            self.need(path, outcome.problem, outcome.note)
        elif outcome.settings:
            default = self._default(path)
            row = Row(path, default, outcome.verdict, outcome.note, is_default=True)
            self._rows.setdefault(path, row)

    def _refuse_unread(self) -> None:
        """Refuses keys without a row in sections that resemble known sections.

        DeepSpeed ignores unknown sections, as zjax ignores sections that resemble no
        known section.
        """
        names = {name for inside in self._known.values() for name in inside}
        for path, value in self._given.items():
            if path in self._rows:
                continue
            if value == {} and path.rpartition(".")[2] in names:
                self._record(path, "it is empty")
            elif path in self._defaults and self[path] == self._default(path):
                self._record(path, "it is the default")
            elif not _nearest(path.partition(".")[0], names):
                self._record(path, "not a key of DeepSpeed, which ignores it, too")
            else:
                self._refuse_unknown(path)

    def _refuse_unknown(self, path: str) -> None:
        """Refuses a key that the section does not have, and names the nearest key."""
        section, _, name = path.rpartition(".")
        names = {name for inside in self._known.values() for name in inside}
        near = _nearest(name, self._known.get(section, ())) or _nearest(name, names)
        homes = [home for home, inside in self._known.items() if name in inside]
        homes = [home for home in homes if home not in ("", section)]
        homes.sort(key=lambda home: -SequenceMatcher(None, section, home).ratio())
        problem, remedy = "is not a key of DeepSpeed", "leave it out"
        if name in self._known.get(section, ()):
            problem = "has no meaning beside the other keys"
        elif near == name and homes:
            problem = f"is not a key of {section or 'the outermost object'}"
            remedy = f"it belongs in {' or '.join(homes[:3])}"
        elif near not in ("", name):
            remedy = f"did you mean {near}?"
        self._record(path, refusal(remedy, problem))


AS_THE_RUN = derived("as the run has it")


def _outcome(meaning: Meaning) -> Outcome:
    """Outcome of a key, from a meaning that may be settings or a reason alone."""
    if isinstance(meaning, Outcome):
        return meaning
    is_reason = isinstance(meaning, str)
    return Outcome("not needed", meaning) if is_reason else derived("", meaning)


def _join(section: str, name: str) -> str:
    """Dotted path of a key in a section."""
    return f"{section}.{name}".strip(".")


def _nearest(name: str, names: Iterable[str]) -> str:
    """Most similar name; empty if no name is similar."""
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.8)), "")
