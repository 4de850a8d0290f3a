"""What each key of a ds_config becomes, collected while it is read."""

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
    """One key.

    Args:
        key: Dotted path.
        value: As in the file, or DeepSpeed's default.
        verdict: What becomes of it.
        note: The settings, the reason or the remedy.
        is_default: Whether the file does not have it.
    """

    key: str
    value: Any
    verdict: Verdict
    note: str
    is_default: bool = False


class Conversion:
    """Settings that a ds_config amounts to, and a row for each of its keys.

    Args:
        values: Keys and values of the file, nested.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._given = leaves(values)
        self.settings = dict[str, Any]()
        """Values by path of a setting of zjax."""
        self._rows = dict[str, Row]()
        self._faults = dict[str, Problem]()
        self._needs = list[Problem]()

    @property
    def rows(self) -> list[Row]:
        """All rows: those of the file in its order, then defaults that matter."""
        given = [self._judged(self._rows[key]) for key in self._given]
        return given + [row for row in self._rows.values() if row.is_default]

    def _judged(self, row: Row) -> Row:
        if not (fault := self._faults.get(row.key)):
            return row
        return dataclasses.replace(row, verdict="not supported", note=fault.remedy)

    def given(self, key: str) -> bool:
        """Whether the file has this key, or one inside of it."""
        return any(k == key or k.startswith(f"{key}.") for k in self._given)

    def is_faulty(self, key: str) -> bool:
        """Whether a key is known not to be honoured."""
        return key in self._faults

    def inside(self, section: str) -> list[str]:
        """Keys of the file in a section of which nothing is told yet."""
        return [
            key
            for key in self._given
            if key.startswith(f"{section}.") and key not in self._rows
        ]

    def get(self, key: str, default: Any, *kinds: type) -> Any:
        """The value of a key, of the type that DeepSpeed makes of it."""
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
        self._faults.setdefault(key, fault)
        return default

    def take(self, key: str, default: Any, *kinds: type) -> Any:
        """As `get`, but None for "auto", which is told to come from the run."""
        value = self.get(key, default, *kinds)
        if value == AUTO:
            self.derive(key, "as the run has it")
            return None
        return value

    def take_type(self, section: str, example: str) -> str:
        """The type of a section that has parameters; empty where there is none."""
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
        """Refuses values where sections belong."""
        for name, allowed in others.items():
            value = self._given.get(name, {})
            if value != {} and value not in allowed:
                remedy = "write an object, or leave it out"
                self._faults[name] = Problem(name, value, "is not an object", remedy)

    def set(
        self, key: str, note: str = "", /, default: Any = _MISSING, **settings: Any
    ):
        """A key that is honoured by settings of zjax."""
        named = {name.replace("__", "."): value for name, value in settings.items()}
        self.settings |= named
        shown = ", ".join(f"{name}={value!r}" for name, value in named.items())
        text = "; ".join(filter(None, (shown, note)))
        self._tell(key, "derived" if note else "mapped", text, default)

    def copy(
        self, key: str, setting: str, default: Any, *, tells_default: bool = True
    ) -> None:
        """A key that is one setting, as it stands."""
        if (value := self.take(key, default)) is not None:
            told = value if tells_default else _MISSING
            self.set(key, default=told, **{setting: value})

    def derive(self, key: str, note: str) -> None:
        """A key that zjax finds out by itself."""
        self._tell(key, "derived", note)

    def skip(self, key: str, why: str) -> None:
        """A key that needs nothing here."""
        self._tell(key, "not needed", why)

    def skip_rest(self, section: str, why: str) -> None:
        """Keys of a section of which nothing is told yet, and that need nothing."""
        for key in self.inside(section):
            self.skip(key, why)

    def refuse_if_on(
        self, key: str, remedy: str, why: str = "it is off", default: Any = False
    ) -> None:
        """A switch, or a number, that cannot be honoured but off, or 0."""
        if self.take(key, default):
            self.refuse(key, remedy)
        else:
            self.skip(key, why)

    def refuse(self, key: str, remedy: str, problem: str = "is not supported") -> None:
        """A key that cannot be honoured."""
        if key in self._given:
            value = self._given[key]
            if key not in self._rows:
                self._faults.setdefault(key, Problem(key, value, problem, remedy))
            self._tell(key, "not supported", remedy)

    def refuse_section(self, section: str, remedy: str) -> None:
        """Keys that cannot be honoured, of which one error tells."""
        for key in self.inside(section) or [section]:
            self._tell(key, "not supported", remedy)
        self.require(section, "is not supported", remedy)

    def require(self, key: str, problem: str, remedy: str) -> None:
        """A key that is missing, or conflicts with another."""
        inside = [k for k in self._given if k.startswith(f"{key}.")]
        value = f"{len(inside)} keys" if inside else self._given.get(key)
        self._needs.append(Problem(key, value, problem, remedy))

    def problems(self) -> list[Problem]:
        """Keys that are not supported, unknown or of the wrong type."""
        found = [self._faults[key] for key in self._given if key in self._faults]
        return found + self._needs

    def finish(self, known: Mapping[str, Collection[str]]) -> None:
        """Refuses each key that no one asked for.

        DeepSpeed ignores unknown sections, and so are those whose name is like none.
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
        """Refuses a key that its section does not have."""
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
        if key in self._rows:
            return
        if key in self._given:
            self._rows[key] = Row(key, self._given[key], verdict, note)
        elif default is not _MISSING:
            self._rows[key] = Row(key, default, verdict, note, is_default=True)


def _nearest(name: str, names: Iterable[str]) -> str:
    """Returns the name that is most like one, or nothing if none is like it."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.8)), "")


def coerce(value: Any, kind: type) -> Any:
    """A value as one of a type, if DeepSpeed takes it so.

    Example:
        >>> coerce(5e8, int), coerce("true", bool), coerce("3e-4", float)
        (500000000, True, 0.0003)
    """
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool):
            return value
        return words.get(str(value).lower(), _MISSING)
    if isinstance(value, bool):
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
