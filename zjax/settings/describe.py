"""Formats settings as text, lists documented settings, and compares two configs."""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zjax.settings import choices, derived, mappings, preference, ranges, rl, schema


def describe_config(config: schema.Config) -> str:
    """Formats the settings that a run reads, as Gin that reads back to an equal config.

    Settings at a default that stands for none are left out: None, (), {}, '', and
    numbers such as `num_tokens=0`.
    """
    left_out = unread(config)
    # Steps derived from epochs would count as set when read back.
    if config.num_epochs and derived.is_offered(config.num_steps):
        left_out.add("num_steps")
    lines = []
    for path, section, value in _settings(config, ""):
        is_read = not any(f"{path}.".startswith(f"{x}.") for x in left_out)
        if is_read and not _is_absent(section, path, value):
            mark = "  # derived" * derived.is_derived(value)
            lines.append(f"config.{path} = {_literal(value)}{mark}\n")
    return "".join(lines)


def _is_absent(section: type, path: str, value: Any) -> bool:
    """Whether a setting is at a default that means none."""
    name = path.rpartition(".")[2]
    is_default = choices.default_of(section, name) == value
    return is_default and ranges.is_none(section, name, value)


_REWARDS = choices.kinds(typing.get_args(choices.hints(rl.Rl)["rewards"])[0])


def describe_settings() -> str:
    """Lists every setting with default, choices and documentation."""
    lines = []
    last = None
    listed = (
        *_documented(schema.Config, ""),
        *_documented(schema.DimRule, "mesh.rules[i]"),
        *_documented(schema.ParamGroup, "optimizer.groups[i]"),
        *_documented_choice(_REWARDS, "rl.rewards[i]", None),
    )
    for setting in listed:
        if setting.section is not last and not setting.kinds:
            lines += ["", inspect.cleandoc(setting.section.__doc__ or "")]
            last = setting.section
        lines += _describe_setting(setting)
    return "\n".join(lines).strip() + "\n"


def setting_paths() -> list[str]:
    """Paths of all settings."""
    return [setting.path for setting in _documented(schema.Config, "")]


def _settings(section: Any, path: str) -> Iterator[tuple[str, type, Any]]:
    """Yields path, section class and value of each setting, and of each choice."""
    for field in dataclasses.fields(section):
        name = f"{path}.{field.name}" if path else field.name
        value = getattr(section, field.name)
        if isinstance(value, choices.Choice):
            yield name, type(section), value.kind
        if dataclasses.is_dataclass(value):
            yield from _settings(value, name)
        else:
            yield name, type(section), value


class _Documented(NamedTuple):
    """Setting with the facts that a list of all settings tells."""

    path: str
    section: type
    value: Any
    kinds: tuple[str, ...] = ()
    """Kinds of a choice that read it; () for a setting outside choices."""


def _documented(
    section: type, path: str, kinds: tuple[str, ...] = (), instance: Any = None
) -> Iterator[_Documented]:
    """Yields every setting of a section, and of the choices inside, once.

    Defaults are values of the instance, where a section has defaults of its own.
    """
    for field in dataclasses.fields(section):
        name = f"{path}.{field.name}" if path else field.name
        value = getattr(instance, field.name) if instance else field.default
        hint = typing.get_type_hints(section)[field.name]
        found = choices.kinds(hint)
        if found or not dataclasses.is_dataclass(value):
            kind = choices.kind_of(type(value)) if found and value else value
            yield _Documented(name, section, kind, kinds)
        if dataclasses.is_dataclass(hint):
            yield from _documented(typing.cast(type, hint), name, kinds, value)
        yield from _documented_choice(found, name, value)


def _documented_choice(
    found: Mapping[str, type | None], path: str, default: Any
) -> Iterator[_Documented]:
    """Yields the settings of a choice, each with the kinds that read the setting.

    A setting of a choice inside keeps the kinds of the choice inside.
    """
    seen = set()
    for kind, one in found.items():
        instance = default if type(default) is one else None
        for setting in _documented(one, path, (kind,), instance) if one else ():
            if setting.path not in seen:
                name = setting.path[len(path) + 1 :].partition(".")[0]
                is_direct = setting.kinds == (kind,)
                readers = tuple(choices.readers(found, name))
                yield setting._replace(kinds=readers) if is_direct else setting
                seen.add(setting.path)


def _describe_setting(setting: _Documented) -> list[str]:
    """Formats one setting with default, documentation, choices and readers."""
    path, section, value, kinds = setting
    name = path.rpartition(".")[2]
    hint = typing.get_type_hints(section)[name]
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    is_literal = typing.get_origin(hint) is typing.Literal
    known = ", ".join(map(str, typing.get_args(hint) if is_literal else ()))
    documented = (_docstrings().get(x.__name__, {}).get(name) for x in section.__mro__)
    parts = [next(filter(None, documented), "")]
    parts += [f"[{known}]"] if known else []
    parts += [f"Of {', '.join(kinds)}."] if kinds else []
    lines = [f"  {path} = {_literal(derived.reset(value))}"]
    lines += _wrapped(" ".join(filter(None, parts)))
    for kind, one in choices.kinds(hint).items():
        lines += _wrapped(
            f"{kind}: {inspect.cleandoc(one.__doc__ or '')}" if one else kind
        )
    return lines


def _wrapped(text: str) -> list[str]:
    """Wraps text in lines that are indented below a setting."""
    indent = " " * 6
    return textwrap.wrap(
        " ".join(text.split()), 88, initial_indent=indent, subsequent_indent=indent
    )


@functools.cache
def _docstrings() -> dict[str, dict[str, str]]:
    """Attribute docstrings of the schema, by class and field."""
    # Python drops strings below fields, but their source has them.
    found = {}
    sources = map(inspect.getsource, (schema, preference, rl))
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for field, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    name = typing.cast(ast.Name, field.target).id
                    texts[name] = ast.literal_eval(after.value)
    return found


def _literal(value: Any) -> str:
    """Formats a value as Gin reads it."""
    if value == math.inf:
        # Gin has no literal for infinity: the loader defines this macro.
        return "%inf"
    if dataclasses.is_dataclass(value):
        names = choices.names(type(value))
        names = [choices.KIND, *names] if isinstance(value, choices.Choice) else names
        entries = (f"{name!r}: {_literal(getattr(value, name))}" for name in names)
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, schema.NameTable):
        return repr(dict(value))
    if isinstance(value, tuple):
        entries = [_literal(entry) for entry in value]
        return f"({', '.join(entries)}{',' * (len(entries) == 1)})"
    return repr(value)


class Absent:
    """Value of a setting that a config does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


class Difference(NamedTuple):
    """Setting whose values differ in two configs."""

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
    lists, and may come from another version of zjax.
    """
    return tuple(_differences("", _plain(config), _plain(other)))


def _plain(config: schema.Config | Mapping[str, Any]) -> Mapping[str, Any]:
    """Nested mapping of a config, without unused offers."""
    if isinstance(config, Mapping):
        return config
    return mappings.to_mapping(derived.without_unused(config))


def _differences(path: str, value: Any, other: Any) -> Iterator[Difference]:
    """Yields differences of two values, section by section."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*value, *other]):
            inner = f"{path}.{name}" if path else name
            entries = value.get(name, ABSENT), other.get(name, ABSENT)
            yield from _differences(inner, *entries)
    elif _holds_sections(value) and _holds_sections(other) and len(value) == len(other):
        for index, entries in enumerate(zip(value, other, strict=True)):
            yield from _differences(f"{path}[{index}]", *entries)
    elif _without_lists(value) != _without_lists(other):
        yield Difference(path, _by_kind(value), _by_kind(other))


def _by_kind(value: Any) -> Any:
    """Kind of a choice that the second config lacks; other values pass unchanged."""
    return value.get(choices.KIND, value) if isinstance(value, Mapping) else value


def _holds_sections(value: Any) -> bool:
    """Whether a value is a list of sections."""
    is_sequence = isinstance(value, list | tuple)
    return is_sequence and all(isinstance(entry, Mapping) for entry in value)


def _without_lists(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Needs(NamedTuple):
    """Setting or section that is read only if a setting has one of some values."""

    setting: str
    other: str
    choices: tuple[Any, ...]


NEEDS = (
    Needs("zero.replicas", "zero.stage", (3,)),
    Needs("precision.reduce_dtype", "precision.compute_dtype", ("bfloat16", "float16")),
    Needs("precision.max_skipped_in_a_row", "precision.on_nonfinite", ("skip",)),
    Needs("precision.loss_scale", "precision.compute_dtype", ("float16",)),
    Needs(
        "model.activation_memory",
        "model.remat",
        ("elementwise", "attention_and_mlp", "attention", "full"),
    ),
    Needs("model.mlp_chunk_tokens", "model.remat", ("attention", "full")),
    Needs("model.query_key_norm_scope", "model.query_key_norm", (True,)),
    Needs("model.norm_position", "model.kind", ("decoder",)),
    Needs("data.path", "data.source", ("tokens",)),
    Needs("data.masking", "model.kind", ("encoder",)),
)


def unread(config: schema.Config) -> set[str]:
    """Paths of settings and sections that a run does not read."""
    found = {
        x.setting for x in NEEDS if choices.value_at(config, x.other) not in x.choices
    }
    return found | ({"pipeline"} if config.mesh.pipeline == 1 else set())
