"""Maps weights of Hugging Face checkpoints to arrays of the built-in models."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.settings import convert, schema
from zjax.settings.derived import as_set
from zjax.weights.codes import find_quantized
from zjax.weights.config_json import entries_of, read_config, shape_of
from zjax.weights.families import Family
from zjax.weights.source import Entry, Source, check_same
from zjax.weights.tensors import Row, from_tensors, layouts_of

TOKENS = "embedding.tokens"
"""Array that every built-in model has, and no Hugging Face checkpoint."""
_LAYER = re.compile(r"(model\.)?layers\.(?P<number>\d+)\.")


def adapted(
    source: Source,
    wanted: Mapping[str, Entry],
    path: pathlib.Path | None,
    given: schema.Model,
    checkpoint: schema.Checkpoint,
) -> Source:
    """Maps a Hugging Face source to a built-in model; returns other sources as is.

    `path` is the config.json beside the source, if any.
    """
    # A run, another model than the built-in ones, or names of zjax already.
    if path is None or TOKENS not in wanted or TOKENS in source.entries:
        return source
    values = read_config(path)
    settings, family = shape_of(values, path)
    model = convert.from_mapping(schema.Model, settings)
    free = set(family.free)
    if given.rotary.max_positions > model.rotary.max_positions:
        free.add("positions.max_positions")  # the run extends the context
    if checkpoint.resize_vocabulary:
        free.add("vocab_size")
    mine, theirs = (entries_of(each, settings) for each in (given, model))
    _check_model(mine, theirs, free, path)
    prefix = _find_prefix(source, family)
    layouts = dict(layouts_of(_renamed(source, family, prefix), model))
    ignored = _find_ignored(source, family, model)
    plain = {
        name: Entry(layout.tensor_shape, "float32")
        for layout in layouts.values()
        for name in layout.tensors.values()
    }
    quantized = find_quantized(values, plain, source)
    # Compared in stored form, so that missing scales are named, too.
    stored = quantized.stored(plain)
    check_same(
        stored,
        {name: x for name, x in source.entries.items() if name not in ignored},
        checkpoint.init_from,
        cast=stored,
    )
    short = (_shortened(name, model.num_layers) for name in ignored)
    _report(checkpoint.init_from, prefix, tuple(dict.fromkeys(short)))
    quantized.report(checkpoint.init_from)
    return from_tensors(quantized.dequantized(source), layouts)


def _check_model(
    given: Mapping[str, Any],
    expected: Mapping[str, Any],
    free: Collection[str],
    path: pathlib.Path,
) -> None:
    """Refuses `model` settings that differ from a config.json, but for free ones."""
    problems = []
    for name, mine in given.items():
        theirs = expected[name]
        if mine != theirs and name not in free:
            problem, remedy = f"is not the {theirs!r} of {path}", f"use {theirs!r}"
            if name == "vocab_size" and mine > theirs:
                remedy += ", or set checkpoint.resize_vocabulary"
            problems.append(Problem(f"model.{name}", as_set(mine), problem, remedy))
    if problems:
        raise ConfigError(*problems)


def _find_prefix(source: Source, family: Family) -> str:
    """Prefix of tensor names; empty in a model that was saved without a head."""
    has_prefix = any(name.startswith(family.prefix) for name in source.entries)
    return family.prefix if has_prefix else ""


def _renamed(source: Source, family: Family, prefix: str) -> tuple[Row, ...]:
    """Rows of the table, with the spelling of tensor names in a checkpoint."""
    endings = {
        new: old
        for new, old in family.spellings.items()
        if any(name.endswith(old) for name in source.entries)
    }

    def rename(name: str) -> str:
        name = re.sub(f"^{family.prefix}", prefix, name)
        new = next(filter(name.endswith, endings), None)
        return name if new is None else name.removesuffix(new) + endings[new]

    rows = family.rows
    return tuple(dataclasses.replace(x, theirs=rename(x.theirs)) for x in rows)


def _find_ignored(
    source: Source, family: Family, model: schema.Model
) -> tuple[str, ...]:
    """Names of tensors that logits do not depend on.

    Buffers, poolers, copies of a tied table, and layers behind the last layer.
    """
    return tuple(
        name
        for name in source.entries
        if re.fullmatch(family.buffers, name)
        or (name == "lm_head.weight" and model.tied_head)
        or (family.predicts_more and _layer_of(name) >= model.num_layers)
    )


def _layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 for none."""
    found = _LAYER.match(name)
    return int(found["number"]) if found else -1


def _shortened(name: str, num_layers: int) -> str:
    """Name for messages, shared by all tensors of a layer behind the last."""
    found = _LAYER.match(name)
    return f"{found[0]}*" if found and _layer_of(name) >= num_layers else name


def _report(path: str, prefix: str, ignored: Sequence[str]) -> None:
    """Logs on process 0 the spelling of tensor names, and the ignored tensors."""
    if jax.process_index() == 0:
        unread = f"; not read, as logits do not need them: {', '.join(ignored)}"
        logging.warning(
            "checkpoint.init_from=%r has the tensor names of Hugging Face, %s%s",
            path,
            f"beginning with {prefix!r}" if prefix else "without a prefix",
            unread if ignored else "",
        )
