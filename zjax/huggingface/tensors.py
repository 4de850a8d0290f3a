"""Names and layouts of the tensors of Hugging Face checkpoints, one table per family.

Each row names an array of the built-in decoder and the tensor that holds it. Rows are
read in both directions: weights come in slice by slice, and go out whole.

Reference: the model classes of github.com/huggingface/transformers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from zjax.checkpoint.views import Index
from zjax.config import schema

Read = Callable[[Index], np.ndarray]
"""Function that reads a slice of a tensor."""
_SIZES = {
    "embed": "embed_size",
    "mlp": "mlp_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head": "head_size",
    "vocab": "vocab_size",
    "length": "max_length",
}
"""Settings of the sizes of dims."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Where one array of the decoder lies in a checkpoint.

    Args:
        ours: Path of the array in the decoder, with dots.
        theirs: Name of the tensor; `{}` is the number of the layer.
        dims: Names of the array's dims; `|` separates those that are one dim of the
            tensor.
        is_transposed: Whether the tensor has its dims in reverse, as a torch `Linear`.
        part: Index of the array in a tensor that joins several along its outputs.
        num_parts: Number of arrays in the tensor.
        needs: Boolean setting of the model without which there is no such array.
        unless: Boolean setting with which there is none.
    """

    ours: str
    theirs: str
    dims: str
    is_transposed: bool = False
    part: int = 0
    num_parts: int = 1
    needs: str = ""
    unless: str = ""

    def exists(self, model: schema.Model) -> bool:
        """Whether a model has this array."""
        has = getattr(model, self.needs) if self.needs else True
        return has and not (self.unless and getattr(model, self.unless))

    def groups(self, model: schema.Model) -> tuple[tuple[int, ...], ...]:
        """Sizes of the array's dims, grouped by dim of the tensor."""
        return tuple(
            tuple(getattr(model, _SIZES[name]) for name in group.split())
            for group in self.dims.split("|")
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the elements of one array lie in its tensor.

    Args:
        row: Row of the table.
        groups: Sizes of the array's dims, grouped by dim of the tensor.
    """

    row: Row
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(size for group in self.groups for size in group)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        *others, outputs = map(math.prod, self.groups)
        return self._turned((*others, outputs * self.row.num_parts))

    def read(self, index: Index, read: Read) -> np.ndarray:
        """Reads a slice of the array; `read` reads one of the tensor."""
        spans, places = list[slice](), iter(index)
        inner = list[slice]()
        shape = list[int]()
        for sizes in self.groups:
            first, *others = (next(places) for _ in sizes)
            size = math.prod(sizes[1:])
            spans.append(slice(first.start * size, first.stop * size))
            inner += [slice(None), *others]
            shape += [first.stop - first.start, *sizes[1:]]
        start = self.row.part * math.prod(self.groups[-1])
        spans[-1] = slice(spans[-1].start + start, spans[-1].stop + start)
        found = read(self._turned(tuple(spans)))
        found = found.T if self.row.is_transposed else found
        return found.reshape(shape)[tuple(inner)]

    def _turned(self, dims):
        return dims[::-1] if self.row.is_transposed else dims


def layouts_of(
    rows: tuple[Row, ...], model: schema.Model
) -> Iterator[tuple[str, str, Layout]]:
    """The arrays of a model: name, name of the tensor, and layout.

    Layers are apart, under names such as `blocks.mlp.up.kernel[0]`.
    """
    for row in rows:
        if not row.exists(model):
            continue
        layout = Layout(row, row.groups(model))
        if "{}" not in row.theirs:
            yield row.ours, row.theirs, layout
            continue
        for layer in range(model.num_layers):
            yield f"{row.ours}[{layer}]", row.theirs.format(layer), layout


def _linear(ours: str, theirs: str, dims: str) -> tuple[Row, ...]:
    """Kernel and bias of a torch `Linear`."""
    ours, theirs = f"blocks.{ours}", f"model.layers.{{}}.{theirs}"
    outputs = dims.rpartition("|")[2]
    return (
        Row(f"{ours}.kernel", f"{theirs}.weight", dims, is_transposed=True),
        Row(f"{ours}.bias", f"{theirs}.bias", outputs, needs="use_bias"),
    )


def _conv(ours: str, theirs: str, dims: str, part: int = 0, of: int = 1):
    """Kernel and bias of GPT-2's `Conv1D`, whose kernel is not transposed."""
    ours, theirs = f"blocks.{ours}", f"transformer.h.{{}}.{theirs}"
    outputs = dims.rpartition("|")[2]
    return (
        Row(f"{ours}.kernel", f"{theirs}.weight", dims, part=part, num_parts=of),
        Row(f"{ours}.bias", f"{theirs}.bias", outputs, part=part, num_parts=of),
    )


def _layer_norm(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        Row(f"{ours}.scale", f"{theirs}.weight", "embed"),
        Row(f"{ours}.bias", f"{theirs}.bias", "embed"),
    )


_LAYER = "model.layers.{}"
LLAMA: tuple[Row, ...] = (
    Row("embedding.tokens", "model.embed_tokens.weight", "vocab | embed"),
    Row("blocks.attention_norm.scale", f"{_LAYER}.input_layernorm.weight", "embed"),
    *_linear("attention.query", "self_attn.q_proj", "embed | heads head"),
    *_linear("attention.key", "self_attn.k_proj", "embed | kv_heads head"),
    *_linear("attention.value", "self_attn.v_proj", "embed | kv_heads head"),
    *_linear("attention.out", "self_attn.o_proj", "heads head | embed"),
    Row(
        "blocks.attention.query_norm.scale",
        f"{_LAYER}.self_attn.q_norm.weight",
        "head",
        needs="query_key_norm",
    ),
    Row(
        "blocks.attention.key_norm.scale",
        f"{_LAYER}.self_attn.k_norm.weight",
        "head",
        needs="query_key_norm",
    ),
    Row("blocks.mlp_norm.scale", f"{_LAYER}.post_attention_layernorm.weight", "embed"),
    *_linear("mlp.gate", "mlp.gate_proj", "embed | mlp"),
    *_linear("mlp.up", "mlp.up_proj", "embed | mlp"),
    *_linear("mlp.down", "mlp.down_proj", "mlp | embed"),
    Row("head.norm.scale", "model.norm.weight", "embed"),
    Row("head.kernel", "lm_head.weight", "vocab | embed", unless="tied_head"),
)
"""Llama, Mistral and Qwen3."""
GPT2: tuple[Row, ...] = (
    Row("embedding.tokens", "transformer.wte.weight", "vocab | embed"),
    Row("embedding.positions", "transformer.wpe.weight", "length | embed"),
    *_layer_norm("blocks.attention_norm", "transformer.h.{}.ln_1"),
    *_conv("attention.query", "attn.c_attn", "embed | heads head", 0, 3),
    *_conv("attention.key", "attn.c_attn", "embed | heads head", 1, 3),
    *_conv("attention.value", "attn.c_attn", "embed | heads head", 2, 3),
    *_conv("attention.out", "attn.c_proj", "heads head | embed"),
    *_layer_norm("blocks.mlp_norm", "transformer.h.{}.ln_2"),
    *_conv("mlp.up", "mlp.c_fc", "embed | mlp"),
    *_conv("mlp.down", "mlp.c_proj", "mlp | embed"),
    *_layer_norm("head.norm", "transformer.ln_f"),
    Row("head.kernel", "lm_head.weight", "vocab | embed", unless="tied_head"),
)


def joined(
    parts: Mapping[int, tuple[Layout, np.ndarray]],
) -> np.ndarray:
    """The tensor of whole arrays, by their index in it."""
    tensors = list[np.ndarray]()
    for _, (layout, array) in sorted(parts.items()):
        matrix = array.reshape([math.prod(sizes) for sizes in layout.groups])
        tensors.append(matrix.T if layout.row.is_transposed else matrix)
    if not tensors[1:]:
        return tensors[0]
    transposed = parts[0][0].row.is_transposed
    return np.concatenate(tensors, axis=0 if transposed else -1)
