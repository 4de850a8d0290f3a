"""Families of Hugging Face as architectures of GGUF: metadata, tensor names, layouts.

Reference: convert_hf_to_gguf.py of github.com/ggml-org/llama.cpp.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.errors import ConfigError, Problem, check_installed
from zjax.ops.rotary import scaled_frequencies
from zjax.settings import schema
from zjax.weights.families import FAMILIES
from zjax.weights.family import Fault
from zjax.weights.source import Entry, Index, Source
from zjax.weights.tensors import layouts_of

_COMMON = {"vocab_size": "vocab_size"}
_LLAMA = _COMMON | {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
"""Metadata that repeats the head size."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp that computes what a family does.

    Args:
        name: `general.architecture`, and the prefix of metadata.
        keys: Metadata without the prefix, by key of a config.json.
        alternates: Whether rotated channels alternate, as llama.cpp rotates Llama.
        transposes: Whether matrices have inputs first in the family.
        added: Number that llama.cpp expects to be added to the scales of norms.
        fixed: Keys of a config.json with the one value that llama.cpp computes.
    """

    name: str
    keys: Mapping[str, str]
    alternates: bool = False
    transposes: bool = False
    added: float = 0.0
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_UNWINDOWED = {"use_sliding_window": False}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, alternates=True),
    "qwen2": Architecture("qwen2", _LLAMA, fixed=_UNWINDOWED),
    "qwen3": Architecture("qwen3", _LLAMA, fixed=_UNWINDOWED),
    "qwen3_moe": Architecture(
        "qwen3moe",
        _LLAMA
        | {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma2": Architecture(
        "gemma2",
        _LLAMA
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "sliding_window": "attention.sliding_window",
        },
        added=1.0,
    ),
    "gpt2": Architecture(
        "gpt2",
        _COMMON
        | {
            "n_layer": "block_count",
            "n_embd": "embedding_length",
            "n_inner": "feed_forward_length",
            "n_head": "attention.head_count",
            "n_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        transposes=True,
        fixed={"activation_function": "gelu_new"},
    ),
}
"""Architectures by `model_type`."""
_27B_LAYERS = 46
"""Layers of the Gemma 2 whose queries llama.cpp scales by the width of a head."""
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
_FACTORS = "rope_freqs.weight"
_SCALING, _FACTOR = "rope.scaling.type", "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8_192
"""Numbers of Llama 3.1 and later, as a GGUF file holds only their effect."""


def architecture_of(
    model: schema.Model, kind: str, values: Mapping[str, Any]
) -> Architecture:
    """Finds the architecture of a family; refuses what llama.cpp computes differently.

    Args:
        model: Settings of the model.
        kind: `model_type` of the family.
        values: Content of the config.json that would be written.
    """
    if kind not in ARCHITECTURES:
        problem = f"has no architecture for {kind}, the family of this model"
        remedy = f"use --format=hf, or a model of {', '.join(ARCHITECTURES)}"
        raise ConfigError(Problem("--format", "gguf", problem, remedy))
    found = ARCHITECTURES[kind]
    problems = [
        Problem(name, given, f"is not the {usual!r} of GGUF's {found.name}", _USE_HF)
        for name, usual in found.fixed.items()
        if (given := values.get(name, usual)) != usual
    ]
    problems += _rotation_problems(model, found)
    problems += [
        Problem(key, None, f"has no form in GGUF's {found.name}", _USE_HF)
        for key in found.keys
        if values.get(key) is None
    ]
    if kind == "gemma2" and values["query_pre_attn_scalar"] != _query_scale(values):
        given, usual = values["query_pre_attn_scalar"], _query_scale(values)
        text = f"is not the {usual} of GGUF's gemma2 with this shape"
        problems.append(Problem("query_pre_attn_scalar", given, text, _USE_HF))
    if kind == "gemma2":
        given, slides = values["layer_types"], ("sliding_attention", "full_attention")
        if given != [slides[x % 2] for x in range(len(given))]:
            text = "does not alternate from sliding_attention on, as GGUF's gemma2 does"
            problems.append(Problem("layer_types", given, text, _USE_HF))
    if problems:
        raise ConfigError(*problems)
    return found


_USE_HF = "use --format=hf"


def _rotation_problems(
    model: schema.Model, architecture: Architecture
) -> Iterator[Problem]:
    """Yields scalings of rotary positions that llama.cpp computes differently."""
    scaling = model.rotary.scaling if "rope_theta" in architecture.keys else None
    if scaling is None or isinstance(scaling, schema.LinearRope | schema.Llama3):
        return
    usual = schema.Yarn(factor=getattr(scaling, "factor", 1.0))
    if isinstance(scaling, schema.Yarn):
        usual = dataclasses.replace(usual, original_length=scaling.original_length)
    if scaling != usual:
        problem = f"is not linear, llama3 or plain yarn in GGUF's {architecture.name}"
        yield Problem("model.positions.scaling", scaling.kind, problem, _USE_HF)


def _query_scale(values: Mapping[str, Any]) -> int:
    """Size by whose root llama.cpp divides the scores of a Gemma 2."""
    if values.get("num_hidden_layers") == _27B_LAYERS:
        return values["hidden_size"] // values["num_attention_heads"]
    return values["head_dim"]


def metadata_of(
    model: schema.Model, architecture: Architecture, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Metadata of a model by name without the prefix of the architecture."""
    found = {name: values[key] for key, name in architecture.keys.items()}
    if "head_dim" in architecture.keys:
        found |= dict.fromkeys(_HEAD_SIZES, values["head_dim"])
    scaling = model.rotary.scaling if "rope_theta" in architecture.keys else None
    if isinstance(scaling, schema.LinearRope | schema.Yarn):
        found |= {_SCALING: scaling.kind, _FACTOR: float(scaling.factor)}
    if isinstance(scaling, schema.Yarn):
        found[_ORIGINAL] = scaling.original_length
    return found


def values_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, Entry], read: Callable[..., Any]
) -> dict[str, Any]:
    """Content of a config.json for the metadata and the tensors of a GGUF file.

    Args:
        metadata: Metadata by full name.
        tensors: Entries of the tensors, by name.
        read: Function that reads a whole tensor by name.
    """
    name = metadata.get("general.architecture")
    kinds = {x.name: kind for kind, x in ARCHITECTURES.items()}
    if name not in kinds:
        return {"model_type": name}  # refused with the list of families
    kind = kinds[name]
    architecture, prefix = ARCHITECTURES[kind], f"{name}."
    given = {
        x.removeprefix(prefix): _plain(value)
        for x, value in metadata.items()
        if x.startswith(prefix)
    }
    values = {
        key: given[x] for key, x in architecture.keys.items() if x in given
    } | dict(architecture.fixed)
    values |= {
        "model_type": kind,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if "token_embd.weight" in tensors:
        values.setdefault("vocab_size", tensors["token_embd.weight"].shape[0])
    if "head_dim" in architecture.keys:
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        if isinstance(heads, int) and isinstance(width, int) and heads > 0:
            values.setdefault("head_dim", width // heads)
            values.setdefault("num_key_value_heads", heads)
        values |= _scaling_values(given, values, tensors, read)
        biases = FAMILIES[kind].biases
        values |= {x: _BIASES[x] in tensors for x in biases if x in _BIASES}
    if kind == "gemma2" and "head_dim" in values:
        values["query_pre_attn_scalar"] = _query_scale(values)
    return values


def _plain(value: Any) -> Any:
    """Turns a float32 into the shortest number that rounds to it, such as 1e-06."""
    return float(str(value)) if type(value) is np.float32 else value


def _scaling_values(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    tensors: Mapping[str, Entry],
    read: Callable[..., Any],
) -> dict[str, Any]:
    """Keys of a config.json for the scaling of rotary positions."""
    if _FACTORS in tensors:
        return {"rope_scaling": _llama3_values(values, read(_FACTORS))}
    if given.get(_SCALING, "none") == "none":
        return {}
    rope = {"rope_type": given[_SCALING], "factor": given.get(_FACTOR)}
    if _ORIGINAL in given:
        rope["original_max_position_embeddings"] = given[_ORIGINAL]
    return {"rope_scaling": rope}


def _llama3_values(values: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Scaling of Llama 3 with given factors; other factors are refused."""
    rope = {
        "rope_type": "llama3",
        "factor": float(factors.max(initial=1.0)),
        **_LLAMA3,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }
    scaling = schema.Llama3(factor=rope["factor"], original_length=_LLAMA3_LENGTH)
    size, theta = 2 * factors.size, values.get("rope_theta", 10_000.0)
    usual = np.zeros(0)
    if values.get("head_dim") == size and isinstance(theta, float) and theta > 0:
        usual = _factors_of(size, theta, scaling)
    if usual.shape != factors.shape or not np.allclose(factors, usual, rtol=1e-4):
        problem, remedy = "has other factors than Llama 3.1", "use another checkpoint"
        raise ConfigError(Problem("tensor", _FACTORS, problem, remedy))
    return rope


def unread_faults(metadata: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields metadata that may change outputs and that zjax does not read."""
    name = metadata.get("general.architecture")
    found = next((x for x in ARCHITECTURES.values() if x.name == name), None)
    if found is None:
        return
    known = {*found.keys.values(), *_IGNORED}
    if "head_dim" in found.keys:
        known |= {*_HEAD_SIZES, _SCALING, _FACTOR, _ORIGINAL}
    size = metadata.get(f"{name}.attention.key_length")
    for key, value in metadata.items():
        short = key.removeprefix(f"{name}.")
        if short == key:
            continue
        if short not in known or (short in _HEAD_SIZES and size not in (None, value)):
            problem = "is not supported: zjax does not compute it"
            yield Fault(key, value, problem, "use a checkpoint without it")


_IGNORED = frozenset({"rope.scaling.finetuned"})


def rotation_factors(
    model: schema.Model, architecture: Architecture
) -> dict[str, np.ndarray]:
    """Tensor by which llama.cpp divides frequencies; empty without such a scaling."""
    scaling = model.rotary.scaling if "rope_theta" in architecture.keys else None
    if not isinstance(scaling, schema.Llama3):
        return {}
    size = model.rotary.size or model.head_size
    return {_FACTORS: _factors_of(size, model.rotary.theta, scaling)}


def _factors_of(size: int, theta: float, scaling: schema.Llama3) -> np.ndarray:
    """Quotients of plain and scaled frequencies, float32[size / 2]."""
    zero = jnp.zeros((1, 1), jnp.int32)
    plain, scaled = (
        np.asarray(scaled_frequencies(zero, size, theta, x))[0] for x in (None, scaling)
    )
    return (plain / scaled).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a tensor of Hugging Face in a GGUF file.

    Args:
        name: Name of the tensor in the file.
        heads: Heads whose rotated channels alternate in the file; 0 for others.
        is_transposed: Whether the file has outputs first and the family inputs.
        added: Number that the file adds.
        expert: Index along the first dim of a stack of experts; None for no stack.
    """

    name: str
    heads: int = 0
    is_transposed: bool = False
    added: float = 0.0
    expert: int | None = None

    def store(self, array: np.ndarray) -> np.ndarray:
        """Turns a tensor of Hugging Face into the layout of the file."""
        if self.heads:
            split = array.reshape(self.heads, 2, -1, *array.shape[1:])
            array = split.swapaxes(1, 2).reshape(array.shape)
        if self.is_transposed:
            array = array.T
        return array + np.float32(self.added) if self.added else array

    def restore(self, array: np.ndarray) -> np.ndarray:
        """Turns a tensor of the file into the layout of Hugging Face."""
        if self.heads:
            split = array.reshape(self.heads, -1, 2, *array.shape[1:])
            array = split.swapaxes(1, 2).reshape(array.shape)
        if self.is_transposed:
            array = array.T
        return array - np.float32(self.added) if self.added else array


def places_of(model: schema.Model, kind: str) -> dict[str, tuple[Place, Entry]]:
    """Places of the tensors of a family by name, with the shapes of Hugging Face."""
    check_installed("gguf")
    import gguf

    architecture = ARCHITECTURES[kind]
    arch = next(x for x, y in gguf.MODEL_ARCH_NAMES.items() if y == architecture.name)
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    found = dict[str, tuple[Place, Entry]]()
    for ours, layout in layouts_of(FAMILIES[kind].rows, model):
        for indices, tensor in layout.tensors.items():
            expert = indices[0] if "experts" in layout.row.apart else None
            searched = tensor.replace(f".experts.{expert}.", ".experts.")
            name = names.get_name(searched, try_suffixes=(".weight", ".bias"))
            if name is None:
                problem = f"has no place in GGUF's {architecture.name}"
                raise ConfigError(Problem("tensor", tensor, problem, _USE_HF))
            is_rotated = ".attention.query." in ours or ".attention.key." in ours
            heads = model.num_heads if ".query." in ours else model.num_kv_heads
            is_matrix = ours.startswith("blocks.") and len(layout.tensor_shape) == 2
            is_norm = "norm" in name and architecture.added
            place = Place(
                name,
                heads if is_rotated and architecture.alternates else 0,
                is_matrix and architecture.transposes,
                architecture.added if is_norm else 0.0,
                expert,
            )
            found[tensor] = place, Entry(layout.tensor_shape, "float32")
    return found


def to_gguf(source: Source, model: schema.Model, kind: str) -> Source:
    """Returns the tensors of a GGUF file, made of the tensors of Hugging Face."""
    stacks = dict[str, list[tuple[str, Place]]]()
    for tensor, (place, _) in places_of(model, kind).items():
        stacks.setdefault(place.name, []).append((tensor, place))
    entries = {name: _stored_entry(source, held) for name, held in stacks.items()}

    def read(name: str, index: Index) -> np.ndarray:
        arrays = [
            place.store(source.read_all(tensor).astype(np.float32))
            for tensor, place in stacks[name]
        ]
        whole = arrays[0] if stacks[name][0][1].expert is None else np.stack(arrays)
        return whole[index]

    return Source(entries, read)


def _stored_entry(source: Source, held: list[tuple[str, Place]]) -> Entry:
    """Entry of a tensor of a file, which may hold a stack of experts."""
    tensor, place = held[0]
    entry = source.entries[tensor]
    shape = entry.shape[::-1] if place.is_transposed else entry.shape
    return Entry(shape if place.expert is None else (len(held), *shape), entry.dtype)


def from_gguf(source: Source, model: schema.Model, kind: str) -> Source:
    """Returns the tensors of Hugging Face, read from the tensors of a GGUF file.

    Tensors that the model lacks keep their names, so that they are refused by name.
    """
    places = places_of(model, kind)
    entries = dict[str, Entry]()
    for tensor, (place, entry) in places.items():
        if place.name in source.entries:
            stored = source.entries[place.name]
            shape = stored.shape if place.expert is None else stored.shape[1:]
            shape = shape[::-1] if place.is_transposed else shape
            entries[tensor] = Entry(shape, entry.dtype)
    used = {place.name for place, _ in places.values()} | {_FACTORS}
    rest = {name: x for name, x in source.entries.items() if name not in used}

    @functools.lru_cache(maxsize=1)
    def restored(name: str) -> np.ndarray:
        place, _ = places[name]
        stored = source.entries[place.name].shape
        index = tuple(slice(0, n) for n in stored)
        if place.expert is None:
            return place.restore(source.read(place.name, index))
        index = (slice(place.expert, place.expert + 1), *index[1:])
        return place.restore(source.read(place.name, index)[0])

    def read(name: str, index: Index) -> np.ndarray:
        return source.read(name, index) if name in rest else restored(name)[index]

    return Source(entries | rest, read)
