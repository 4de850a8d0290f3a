"""Collects the settings and verdicts of a ds_config while sections are read."""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from zjax.deepspeed.reading import leaves
from zjax.errors import Problem

Verdict = Literal["mapped", "derived", "not needed", "not supported"]
AUTO = "auto"
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Row:
    """Verdict on one key.

    Args:
        key: Dotted path of the key.
        value: Value in the file, or DeepSpeed's default.
        verdict: Verdict on the key.
        note: Settings, reason or remedy.
        is_default: Whether the file lacks the key.
    """

    key: str
    value: Any
    verdict: Verdict
    note: str
    is_default: bool = False


class Conversion:
    """Settings equivalent to a ds_config, and a row for each key.

    Args:
        values: Nested keys and values of the file.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._given = leaves(values)
        self.settings = dict[str, Any]()
        """Values by path of the zjax setting."""
        self._rows = dict[str, Row]()
        self._faults = dict[str, Problem]()
        self._needs = list[Problem]()

    @property
    def rows(self) -> list[Row]:
        """Rows of the keys in the order of the file, then of defaults that matter."""
        given = [self._judged(self._rows[key]) for key in self._given]
        return given + [row for row in self._rows.values() if row.is_default]

    def _judged(self, row: Row) -> Row:
        """Row with the remedy of a faulty key."""
        if not (fault := self._faults.get(row.key)):
            return row
        return dataclasses.replace(row, verdict="not supported", note=fault.remedy)

    def given(self, key: str) -> bool:
        """Whether the file has a key, or a section of this name."""
        return any(k == key or k.startswith(f"{key}.") for k in self._given)

    def is_faulty(self, key: str) -> bool:
        """Whether a key was refused."""
        return key in self._faults

    def inside(self, section: str) -> list[str]:
        """Keys of the file in a section that have no row yet."""
        return [
            key
            for key in self._given
            if key.startswith(f"{section}.") and key not in self._rows
        ]

    def get(self, key: str, default: Any, *kinds: type) -> Any:
        """Value of a key as DeepSpeed coerces it; `AUTO` for "auto".

        `default` is DeepSpeed's value if the key is missing or null; the type must be
        one of `kinds`, or of the default. A value of a wrong type is a fault, and gives
        the default.
        """
        value = self._given.get(key)
        if value is None or value == {}:
            return default
        if value == AUTO:
            return AUTO
        for kind in kinds or (type(default),):
            coerced = coerce(value, kind)
            if coerced is not _MISSING:
                return coerced
        names = " or ".join(
            _NAMES.get(k, k.__name__) for k in kinds or (type(default),)
        )
        fault = Problem(key, value, f"is not {names}", f"write {names}")
        # Converters may read a key several times: the first fault is reported.
        self._faults.setdefault(key, fault)
        return default

    def take(self, key: str, default: Any, *kinds: type) -> Any:
        """Value of a key as from `get`, but None for "auto", which the run sets."""
        value = self.get(key, default, *kinds)
        if value == AUTO:
            self.derive(key, "as the run has it")
            return None
        return value

    def take_type(self, section: str, example: str) -> str:
        """Type of a section with parameters; empty if the file has none.

        `example` is a type to name in an error.
        """
        key, remedy = f"{section}.type", f"name one, as {example}"
        if kind := self.take(key, ""):
            return kind
        if kind is None:
            self._rows.pop(key)
            self.refuse(key, remedy, "is filled by no run")
        elif self.inside(section) and key not in self._given:
            self.require(key, "is not given", remedy)
        self.skip_rest(section, "its type is not given")
        return ""

    def check_sections(self, others: Mapping[str, Sequence[Any]]) -> None:
        """Refuses values in place of sections, except values that DeepSpeed allows."""
        for name, allowed in others.items():
            value = self._given.get(name, {})
            if value != {} and value not in allowed:
                remedy = "write an object, or leave it out"
                self._faults[name] = Problem(name, value, "is not an object", remedy)

    def set(
        self, key: str, note: str = "", /, default: Any = _MISSING, **settings: Any
    ):
        """Maps a key to settings of zjax, by path with `__` for dots.

        With a note the key counts as derived, else as mapped. `default` is DeepSpeed's
        value, for a row if the file lacks the key.
        """
        # Keyword arguments cannot hold dots.
        named = {name.replace("__", "."): value for name, value in settings.items()}
        self.settings |= named
        shown = ", ".join(f"{name}={value!r}" for name, value in named.items())
        text = "; ".join(filter(None, (shown, note)))
        self._tell(key, "derived" if note else "mapped", text, default)

    def copy(
        self, key: str, setting: str, default: Any, *, tells_default: bool = True
    ) -> None:
        """Maps a key to one setting with the value unchanged.

        If the file lacks the key, the setting gets DeepSpeed's default, with a row if
        `tells_default`.
        """
        if (value := self.take(key, default)) is not None:
            told = value if tells_default else _MISSING
            self.set(key, default=told, **{setting: value})

    def derive(self, key: str, note: str) -> None:
        """Notes a key that zjax derives by itself."""
        self._tell(key, "derived", note)

    def skip(self, key: str, why: str) -> None:
        """Notes a key that zjax does not need."""
        self._tell(key, "not needed", why)

    def skip_rest(self, section: str, why: str) -> None:
        """Notes all keys of a section without a row as not needed."""
        for key in self.inside(section):
            self.skip(key, why)

    def refuse_if_on(
        self, key: str, remedy: str, why: str = "it is off", default: Any = False
    ) -> None:
        """Refuses a switch or number unless it is off or 0."""
        if self.take(key, default):
            self.refuse(key, remedy)
        else:
            self.skip(key, why)

    def refuse(self, key: str, remedy: str, problem: str = "is not supported") -> None:
        """Refuses a key of the file that zjax does not support."""
        if key in self._given:
            value = self._given[key]
            if key not in self._rows:
                self._faults.setdefault(key, Problem(key, value, problem, remedy))
            self._tell(key, "not supported", remedy)

    def refuse_section(self, section: str, remedy: str) -> None:
        """Refuses all keys of a section by one error."""
        for key in self.inside(section) or [section]:
            self._tell(key, "not supported", remedy)
        self.require(section, "is not supported", remedy)

    def require(self, key: str, problem: str, remedy: str) -> None:
        """Refuses a file for a key that is missing or conflicts with another key."""
        inside = [k for k in self._given if k.startswith(f"{key}.")]
        value = f"{len(inside)} keys" if inside else self._given.get(key)
        self._needs.append(Problem(key, value, problem, remedy))

    def problems(self) -> list[Problem]:
        """Problems of unsupported, unknown or mistyped keys, and of missing keys."""
        found = [self._faults[key] for key in self._given if key in self._faults]
        return found + self._needs

    def finish(self, known: Mapping[str, Collection[str]]) -> None:
        """Refuses each key that no converter has read, if it resembles a known key.

        DeepSpeed ignores unknown sections, as zjax ignores sections that resemble no
        known one.
        """
        names = {name for inside in known.values() for name in inside}
        for key in self._given:
            if key in self._rows:
                continue
            name = key.rpartition(".")[2]
            if self._given[key] == {} and name in names:
                self.skip(key, "it is empty")
            elif not _nearest(key.partition(".")[0], names):
                self.skip(key, "not a key of DeepSpeed, which ignores it, too")
            else:
                self.refuse_unknown(key, known)

    def refuse_unknown(self, key: str, known: Mapping[str, Collection[str]]) -> None:
        """Refuses a key that the section does not have, and names the nearest key."""
        section, _, name = key.rpartition(".")
        names = {name for inside in known.values() for name in inside}
        near = _nearest(name, known.get(section, ())) or _nearest(name, names)
        homes = [home for home, inside in known.items() if home and name in inside]
        if near == name and homes:
            place = section or "the outermost object"
            remedy = f"it belongs in {' or '.join(homes[:3])}"
            self.refuse(key, remedy, f"is not a key of {place}")
        else:
            remedy = (
                f"did you mean {near}?" if near not in ("", name) else "leave it out"
            )
            self.refuse(key, remedy, "is not a key of DeepSpeed")

    def _tell(self, key, verdict: Verdict, note, default=_MISSING) -> None:
        """Adds a row for a key, unless the key has one."""
        if key in self._rows:  # the first verdict wins
            return
        if key in self._given:
            self._rows[key] = Row(key, self._given[key], verdict, note)
        elif default is not _MISSING:
            self._rows[key] = Row(key, default, verdict, note, is_default=True)


def _nearest(name: str, names: Iterable[str]) -> str:
    """Most similar name; empty if no name is similar."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.8)), "")


def coerce(value: Any, kind: type) -> Any:
    """Coerces a value to a type as DeepSpeed does; `_MISSING` if that is impossible.

    Example:
        >>> coerce(5e8, int), coerce("true", bool), coerce("3e-4", float)
        (500000000, True, 0.0003)
    """
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool):
            return value
        return words.get(str(value).lower(), _MISSING)
    if isinstance(value, bool):  # a bool is an int to Python
        return _MISSING
    if kind in (int, float) and isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return _MISSING
        if kind is float:
            return number
        return int(number) if number.is_integer() else _MISSING
    return value if isinstance(value, kind) else _MISSING


_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}
_NAMES |= {str: "a text", list: "a list", dict: "an object"}
