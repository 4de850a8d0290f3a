"""Translates old names of nested settings to present names, all together."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from zjax.errors import Problem
from zjax.settings import choices, mappings, renamed
from zjax.settings.choices import KIND, NONE
from zjax.settings.renamed import Old


def with_present_names(
    values: Mapping[str, Any], *, is_record: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """Moves settings under old names to their present places; returns problems, too.

    Old switches first choose the sections. Then settings go inside; settings of a
    section that is off are dropped, and refused unless they are defaults. A record of
    a run, which zjax wrote, is neither refused nor told.

    Example:
        >>> with_present_names({"zero": {"memory": "auto"}}, is_record=True)[0]["zero"]
        {'offload': {'kind': 'auto', 'gradient_memory': 'device', \
'parameter_memory': 'device'}}
    """
    result, found = renamed.find(values)
    problems = [] if is_record else [*_problems(result, found)]
    refused = {problem.field for problem in problems}
    for old in sorted(found, key=_rank):
        if not is_record:
            renamed.warn(old)
        if old.name in refused:
            continue
        off = _section_off(result, old.path) if _rank(old) == _INSIDE else ""
        if not off:
            result = mappings.merge(result, {old.path: old.present})
        elif not (is_record or _is_default(old) or _is_dropped(result, old, off)):
            remedy = f"leave it out, or set {off}"
            problem = f"has no effect without {off}"
            problems.append(Problem(old.name, old.value, problem, remedy))
            refused.add(old.name)  # a preset stands for several settings
    return result, problems


_INSIDE = 3
"""Rank of a setting inside a section."""


def _rank(old: Old) -> int:
    """Order of old names: kinds, switches, sections that are off, settings inside."""
    if old.present is None and _is_choice(old):
        return 2
    return 0 if _is_choice(old) else 1 if old.path in renamed.SWITCHES else _INSIDE


def _is_choice(old: Old) -> bool:
    """Whether an old name chooses a section."""
    return bool(choices.kinds(mappings.type_of(old.path)))


def _problems(values: Mapping[str, Any], found: list[Old]) -> Iterator[Problem]:
    """Yields old names beside present names, and values that choose no section."""
    for old in {old.name: old for old in reversed(found)}.values():
        if any(_is_set(values, x) for x in found if x.name == old.name):
            problem = f"is the old name of {renamed.place(old.name).path}, "
            problem += "which is set, too"
            yield Problem(old.name, old.value, problem, "leave it out")
        elif _is_choice(old) and (known := _unknown(old)):
            problem, remedy = "is not a choice", f"use one of {', '.join(known)}"
            yield Problem(old.name, old.value, problem, remedy)
    is_zero_bubble = any(old.value == "zb_h1" for old in found)
    if is_zero_bubble and _at(values, "pipeline.recompute") is True:
        problem = "has no effect with pipeline.schedule='zb_h1'"
        yield Problem("pipeline.recompute", True, problem, "set it to False")


def _unknown(old: Old) -> list[str]:
    """Values that an old name could have, if it has none of them."""
    moved = renamed.place(old.name)
    kinds = choices.kinds(mappings.type_of(old.path))
    known = renamed.MEMORIES if old.name == renamed.MEMORY else moved.values
    is_bool = True in known
    is_kind = isinstance(old.value, str) and old.value in kinds and not is_bool
    is_section = type(old.value) in kinds.values() and old.value is not None
    is_switch = moved.path != old.path
    if is_switch or is_kind or is_section or renamed.is_one_of(old.value, known):
        return []
    names = [*map(str, known), *(() if is_bool else kinds)]
    return [x for x in dict.fromkeys(names) if x not in ("", "None", NONE)]


def _is_set(values: Mapping[str, Any], old: Old) -> bool:
    """Whether settings under present names say what an old name says."""
    section, _, name = old.path.rpartition(".")
    if not _is_choice(old):
        given = _at(values, section)
        turns_on = old.path in renamed.SWITCHES and given is None
        return turns_on or (name in given if isinstance(given, Mapping) else False)
    given = _at(values, old.path)
    is_inside = old.name.startswith(f"{old.path}.")
    if given is _ABSENT or given is old.present is None:
        return False
    if isinstance(given, Mapping):
        is_kind = renamed.place(old.name).path == old.path and KIND in given
        is_dropped = old.present is None and bool(given) and not is_inside
        return is_kind or is_dropped
    return True


_ABSENT = object()
"""Value of a setting that nested settings do not have."""


def _at(values: Any, path: str) -> Any:
    """Value at a path of nested settings, or `_ABSENT`."""
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _ABSENT
        values = values[name]
    return mappings.to_mapping(values) if dataclasses.is_dataclass(values) else values


def _section_off(values: Mapping[str, Any], path: str) -> str:
    """Outermost section around a setting that is off in nested settings, or ''."""
    names = path.split(".")
    for end in range(1, len(names)):
        section = ".".join(names[:end])
        given = _at(values, section)
        if NONE in choices.kinds(mappings.type_of(section)) and (
            given is _ABSENT or given in (None, "", NONE, {}, choices.OFF, {KIND: None})
        ):
            return section
    return ""


def _is_dropped(values: Mapping[str, Any], old: Old, off: str) -> bool:
    """Whether an old name stood in a section that is set to None, which drops it."""
    return old.name.startswith(f"{off}.") and _at(values, off) is None


def _is_default(old: Old) -> bool:
    """Whether an old name, but no preset, has the default of the present setting."""
    section, _, name = old.path.rpartition(".")
    value = tuple(old.present) if isinstance(old.present, list) else old.present
    defaults = [
        choices.default_of(one, name)
        for one in choices.sections(mappings.type_of(section))
        if name in choices.names(one)
    ]
    is_bool = isinstance(value, bool)
    is_same = (value == x and is_bool == isinstance(x, bool) for x in defaults)
    return old.name != renamed.MEMORY and any(is_same)
