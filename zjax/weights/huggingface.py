"""Maps built-in models to the config.json and tensors of Hugging Face, and back."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.ops.rotary import attention_factor
from zjax.settings import choices, convert, schema
from zjax.settings.derived import as_set
from zjax.settings.mixture import experts_by_layer
from zjax.weights import config_json, gguf_file, gguf_names, layers
from zjax.weights.codes import find_quantized
from zjax.weights.families import FAMILIES
from zjax.weights.family import Family, window_values
from zjax.weights.rotation import rotation_values
from zjax.weights.source import Entry, Source, cached, check_same
from zjax.weights.tensors import Row, from_tensors, layouts_of, to_tensors

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
    values = config_json.read_config(path)
    settings, family = config_json.shape_of(values, path)
    model = convert.from_mapping(schema.Model, settings)
    free = set(family.free)
    if given.rotary.max_positions > model.rotary.max_positions:
        free.add("positions.max_positions")  # the run extends the context
    if checkpoint.resize_vocabulary:
        free.add("vocab_size")
    mine, theirs = (config_json.entries_of(each, settings) for each in (given, model))
    _check_model(mine, theirs, free, path)
    if path.suffix == gguf_file.ENDING:
        source = gguf_names.from_gguf(source, model, values["model_type"])
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
    if path.suffix == gguf_file.ENDING:
        gguf_file.report(checkpoint.init_from, path)
    else:
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


def find_kind(model: schema.Model, remedy: str = "leave out --format=hf") -> str:
    """Finds the `model_type` of a family that computes the outputs of a model."""
    is_mixture = bool(model.moe)
    kinds = [x for x, family in FAMILIES.items() if family.is_mixture == is_mixture]
    differences = {kind: _differences(model, kind, remedy) for kind in kinds}
    # A family of another kind, such as encoder, only if there is no other; then the
    # fewest differences, which the error shows.
    kind = min(
        differences,
        key=lambda x: (FAMILIES[x].constant["kind"] != model.kind, len(differences[x])),
    )
    if problems := differences[kind]:
        raise ConfigError(*problems)
    return kind


def _differences(model: schema.Model, kind: str, remedy: str) -> list[Problem]:
    """Lists settings of a model that a family would compute differently."""
    family = FAMILIES[kind]
    # Written and read back, so that whatever the keys cannot express differs.
    settings = config_json.settings_of(config_of(model, kind), family)
    found = config_json.entries_of(
        convert.from_mapping(schema.Model, settings), settings
    )
    mine = config_json.entries_of(model, settings)
    if model.moe and "moe.bias_rate" not in found and "moe.choice_bias" in found:
        # The family fixes only that there is a bias; a run says whether it moves.
        mine["moe.choice_bias"] = model.moe.has_choice_bias
    factor = "positions.scaling.attention_factor"
    if found.get(factor):  # else derived from lengths
        mine[factor] = attention_factor(model.rotary.scaling)
    pairs = [
        (name, mine[name], theirs)
        for name, theirs in found.items()
        if name not in family.free
    ]
    settable = {key.setting for key in family.keys.values()}
    top_k = mine.get("moe.top_k")
    if top_k == 1 and "moe.normalise" not in settable:
        pairs.append(("moe.top_k", 1, 2))  # normalised, one expert would weigh 1
    if isinstance(model.attention, schema.Sparse):
        pairs.append(("attention", "sparse", "dense"))
    return [
        Problem(f"model.{name}", as_set(mine), f"is {theirs!r} in {kind}", remedy)
        for name, mine, theirs in pairs
        if mine != theirs
    ]


def config_of(model: schema.Model, kind: str) -> dict[str, Any]:
    """Content of config.json, as far as the family has keys for the settings."""
    family = FAMILIES[kind]
    values: dict[str, Any] = {
        "model_type": kind,
        "architectures": [family.architecture],
        # null, since config classes have ids of other tokenizers as defaults.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for name, key in family.keys.items():
        # None in a section that the model does not have: the default stays.
        if (setting := _value_of(model, key.setting)) is not None:
            values[name] = key.to_value(setting)
    values |= family.written
    values |= {x: values[usual] for x, usual in family.aliases.items()}
    fixed = {name: accepted[0] for name, accepted in family.fixed.items()}
    # None stands for an absent key.
    values |= {name: value for name, value in fixed.items() if value is not None}
    if family.padding:
        # transformers counts positions from padding id + 1; the table holds the rows
        # before, too.
        first = choices.value_at(model, "positions.first") or 0
        values[family.padding] = first - 1
        length = next(
            x for x, key in family.keys.items() if key.setting == "max_length"
        )
        values[length] = first + model.max_length
    if family.is_rotary:
        values |= rotation_values(model, family)
    values |= window_values(model, family.windows)
    if family.has_steps and model.moe:
        values |= config_json.layer_values(model, model.moe)
    biases = model.has_input_bias, model.use_bias
    # strict=False: a family may have the first key alone.
    values |= dict(zip(family.biases, biases, strict=False))
    rates = _dropout_rates(model).items()
    named = [(family.dropouts.get(name), rate) for name, rate in rates]
    return values | {key: rate for key, rate in named if key is not None}


def _dropout_rates(model: schema.Model) -> dict[str, float]:
    """Dropout rates of a model, by setting of the families."""
    return {
        "embedding_dropout_rate": model.embedding_dropout,
        "attention_dropout_rate": model.attention_dropout_rate,
        "dropout_rate": model.dropout_rate,
    }


def report_dropouts(model: schema.Model, kind: str) -> None:
    """Warns of dropout rates that a config.json of the family has no key for."""
    values, keys = config_of(model, kind), FAMILIES[kind].dropouts
    for name, rate in _dropout_rates(model).items():
        if rate != values.get(keys.get(name, ""), 0.0):
            text = "model.%s=%r does not go out: %s has no key for it"
            logging.warning(text, name, rate, kind)


def _value_of(model: schema.Model, setting: str) -> Any:
    """Value of a setting in the form of a config.json."""
    if setting == "moe.num_experts":
        return max(experts_by_layer(model))  # a pyramid has several
    if setting == "num_token_types":
        return max(1, model.num_token_types)  # an encoder has 1 at least
    if setting == "moe.normalise":
        # transformers would normalise the weight of one expert to 1, zjax does not.
        moe = model.moe
        return isinstance(moe, schema.TokenChoice) and moe.normalise and moe.top_k > 1
    if setting == "positions.max_positions":
        return model.rotary.max_positions
    return choices.value_at(model, setting)


def model_tensors(source: Source, model: schema.Model, kind: str, place: str) -> Source:
    """Returns the tensors of a Hugging Face checkpoint; `place` is for messages."""
    rows = FAMILIES[kind].rows
    layouts = {n.replace(".", "/"): x for n, x in layouts_of(rows, model)}
    # Cached, so that a stack is read once for all layers.
    source = layers.untiled(cached(source))
    source = layers.restacked(source, list(layouts))
    # Any floating dtype: an export sets the dtypes of the files.
    expected = {n: Entry(layout.shape, "float32") for n, layout in layouts.items()}
    check_same(expected, source.entries, place, cast=expected)
    return to_tensors(source, layouts)
