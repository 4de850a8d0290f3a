"""Exports the weights of a checkpoint as a Hugging Face checkpoint."""

import contextlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.checkpoint import layers
from zjax.checkpoint.export import cast_entries, unwritable, write_file
from zjax.checkpoint.layers import Source
from zjax.checkpoint.layout import Entry, check_same
from zjax.checkpoint.model_state import open_weights
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.files import local_path, new_directory
from zjax.huggingface.families import FAMILIES, Family
from zjax.huggingface.layout import Layout, layouts_of
from zjax.huggingface.rotation import rotation_values
from zjax.huggingface.settings import CONFIG_NAME, entries_of, layer_values, settings_of
from zjax.huggingface.source import find_config
from zjax.huggingface.tokenizer import tokenizer_of_run, write_tokenizer
from zjax.huggingface.windows import window_values
from zjax.ops.rotary import attention_factor
from zjax.settings import choices, convert, schema
from zjax.settings.derived import as_set
from zjax.settings.mixture import experts_by_layer

MAX_SHARD_BYTES = 5 * 10**9
"""Most tensor bytes of one file, the default of transformers."""
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
}
"""Architecture classes, by family that an export may write. A Mistral without window is
written as Llama."""


class _Piece(NamedTuple):
    """Part of a tensor: name and layout of an array, and indices of the tensor."""

    ours: str
    layout: Layout
    place: tuple[int, ...]


_Parts = Mapping[str, Mapping[int, _Piece]]
"""Pieces of each tensor, by position in the tensor."""


def export_huggingface(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Writes a directory that transformers loads: config.json, safetensors, an index.

    Tokenizer, chat template and end ids come from the data of the run. A run without a
    tokenizer record, such as a run on given batches, takes the files of the Hugging
    Face checkpoint with which it started, if still there. The log says which.

    `path` must be empty or missing, and is renamed once complete. One array with all
    layers is in memory at a time. Only one process may call this.
    """
    step = store.latest() if step is None else step
    config = saved_config(store.extra(step))
    model, start = config.model, _find_start(config.checkpoint.init_from)
    kind = find_kind(model)
    report_dropouts(model, kind)
    source, _ = open_weights(store, part, step)
    parts, source = _collect(source, FAMILIES[kind], model, str(store.directory))
    entries = cast_entries(_describe(parts, source), dtype)
    with new_folder(path) as folder:
        values = config_of(model, kind) | {"dtype": next(iter(entries.values())).dtype}
        # Replaces the null ids of `config_of`.
        values |= write_tokenizer(folder, tokenizer_of_run(store, step), start)
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
        _write_shards(folder, entries, parts, source, max_shard_bytes)
    return sum(file.stat().st_size for file in pathlib.Path(path).iterdir())


def _find_start(start: str) -> pathlib.Path | None:
    """Finds the Hugging Face checkpoint at the beginning of a chain of runs."""
    # Ends a cycle of runs that start from one another.
    seen = set[str]()
    while start not in {"", *seen}:
        if (path := find_config(start)) is not None:
            return path.parent
        steps = find_steps(pathlib.Path(local_path("checkpoint.init_from", start)))
        if steps is None:
            problem = "has no config.json; its files do not go along"
            logging.warning("tokenizer: checkpoint.init_from=%r %s", start, problem)
            return None
        seen.add(start)
        config = saved_config(Store(str(steps)).extra())
        start = config.checkpoint.init_from
    return None


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[pathlib.Path]:
    """Yields a folder that is renamed once complete, and removed on errors."""
    target = pathlib.Path(path)
    # An empty directory may be replaced.
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        problem, remedy = "exists and is not empty", "name a new directory"
        raise CheckpointError(Problem("output", path, problem, remedy))
    try:
        with new_directory(target) as partial:
            yield partial
    except OSError as error:
        raise unwritable(path, error) from error


def find_kind(model: schema.Model, remedy: str = "leave out --format=hf") -> str:
    """Finds the `model_type` of a family that computes the outputs of a model.

    Example:
        >>> find_kind(schema.Model())
        'gpt2'
    """
    is_mixture = bool(model.moe)
    kinds = [x for x in _ARCHITECTURES if FAMILIES[x].is_mixture == is_mixture]
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
    settings = settings_of(config_of(model, kind), family)
    found = entries_of(convert.from_mapping(schema.Model, settings), settings)
    mine = entries_of(model, settings)
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
        "architectures": [_ARCHITECTURES[kind]],
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
    for name, fixed in family.fixed.items():
        # None stands for an absent key.
        if fixed.accepted[0] is not None:
            values[name] = fixed.accepted[0]
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
        values |= layer_values(model, model.moe)
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


def _collect(
    source: Source, family: Family, model: schema.Model, place: str
) -> tuple[_Parts, Source]:
    """Maps tensors to pieces of arrays, and returns the source with layers apart."""
    layouts = {n.replace(".", "/"): x for n, x in layouts_of(family.rows, model)}
    # Cached, so that a stack is read once for all layers.
    found = layers.retiled(layers.cached(source), 1)
    found = layers.restacked(found, list(layouts))
    # Any floating dtype: `cast_entries` sets the dtypes of the files.
    expected = {n: Entry(layout.shape, "float32") for n, layout in layouts.items()}
    check_same(expected, found.entries, place, cast=expected)
    parts = dict[str, dict[int, _Piece]]()
    for ours, layout in layouts.items():
        for at, theirs in layout.tensors.items():
            piece = _Piece(ours, layout, at)
            parts.setdefault(theirs, {})[layout.row.part] = piece
    return parts, found


def _describe(parts: _Parts, source: Source) -> dict[str, Entry]:
    """Shapes and dtypes of tensors; the first piece sets the dtype."""
    return {
        name: Entry(pieces[0].layout.tensor_shape, source.entries[pieces[0].ours].dtype)
        for name, pieces in parts.items()
    }


def _write_shards(
    folder: pathlib.Path,
    entries: Mapping[str, Entry],
    parts: _Parts,
    source: Source,
    max_bytes: int,
) -> None:
    """Writes tensors into shards, and an index beside several shards."""

    def read(name: str) -> Iterator[np.ndarray]:
        pieces = [piece for _, piece in sorted(parts[name].items())]
        arrays = [x.layout.piece_of(source.read_all(x.ours), x.place) for x in pieces]
        axis = pieces[0].layout.axis
        yield np.concatenate(arrays, axis) if arrays[1:] else arrays[0]

    shards = [*_split(entries, max_bytes)]
    files = ["model.safetensors"]
    if shards[1:]:
        count = len(shards)
        numbers = range(1, count + 1)
        files = [f"model-{n:05}-of-{count:05}.safetensors" for n in numbers]
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses files without a known format.
        write_file(folder / file, shard, {"format": "pt"}, read)
    if shards[1:]:
        pairs = zip(files, shards, strict=True)
        places = {name: file for file, shard in pairs for name in shard}
        total = sum(map(_num_bytes, entries.values()))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _split(entries: Mapping[str, Entry], max_bytes: int) -> Iterator[dict[str, Entry]]:
    """Splits tensors into shards of `max_bytes`, or of one larger tensor."""
    shard, size = dict[str, Entry](), 0
    for name, entry in entries.items():
        if shard and size + _num_bytes(entry) > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += _num_bytes(entry)
    yield shard


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
