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
from zjax.config.mixture import segment_shapes

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
        parts: Names of the output dims of all arrays in the tensor; () for one.
        needs: Boolean attribute of the settings without which there is no such array.
        unless: Boolean attribute with which there is none.
    """

    ours: str
    theirs: str
    dims: str
    is_transposed: bool = False
    part: int = 0
    parts: tuple[str, ...] = ()
    needs: str = ""
    unless: str = ""

    def exists(self, model: schema.Model) -> bool:
        """Whether a model has this array."""
        has = getattr(model, self.needs) if self.needs else True
        return has and not (self.unless and getattr(model, self.unless))

    def groups(self, model: schema.Model) -> tuple[tuple[int, ...], ...]:
        """Sizes of the array's dims, grouped by dim of the tensor."""
        return tuple(_sizes(model, group) for group in self.dims.split("|"))


def _sizes(model: schema.Model, names: str) -> tuple[int, ...]:
    return tuple(getattr(model, _SIZES[name]) for name in names.split())


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the elements of one array lie in its tensor.

    Args:
        row: Row of the table.
        groups: Sizes of the array's dims, grouped by dim of the tensor.
        outputs: Outputs of all arrays in the tensor.
    """

    row: Row
    groups: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(size for group in self.groups for size in group)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        *others, _ = map(math.prod, self.groups)
        return self._turned((*others, sum(self.outputs)))

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
        start = sum(self.outputs[: self.row.part])
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

    Layers are apart, under names such as `blocks.mlp.up.kernel[0]`, in the order of the
    model's blocks.
    """
    places = [*_places(model)]
    for row in rows:
        if not row.exists(model):
            continue
        names = row.parts or (row.dims.rpartition("|")[2],)
        outputs = tuple(math.prod(_sizes(model, name)) for name in names)
        layout = Layout(row, row.groups(model), outputs)
        if "{}" not in row.theirs:
            yield row.ours, row.theirs, layout
            continue
        for layer, (block, number) in enumerate(places):
            ours = row.ours.replace("blocks.", block, 1)
            yield f"{ours}[{number}]", row.theirs.format(layer), layout


def _places(model: schema.Model) -> Iterator[tuple[str, int]]:
    """Name of the stack and index in it of each layer."""
    shapes = segment_shapes(model)
    for segment, shape in enumerate(shapes):
        name = f"blocks.segment{segment}." if shapes[1:] else "blocks."
        for block in range(shape.num_blocks):
            for layer in range(len(shape.slides)):
                yield f"{name}layer{layer}." if shape.slides[1:] else name, block


_INPUTS = ("heads head", "kv_heads head", "kv_heads head")
"""Outputs of queries, keys and values."""
_LAYER = "model.layers.{}"


def _linear(
    ours: str,
    theirs: str,
    dims: str,
    *,
    bias: str = "use_bias",
    part: int = 0,
    parts: tuple[str, ...] = (),
) -> tuple[Row, ...]:
    """Kernel and bias of a torch `Linear`, or of one that joins several."""
    ours, theirs = f"blocks.{ours}", f"{_LAYER}.{theirs}"
    outputs = dims.rpartition("|")[2]
    return (
        Row(f"{ours}.kernel", f"{theirs}.weight", dims, True, part, parts),
        Row(f"{ours}.bias", f"{theirs}.bias", outputs, False, part, parts, needs=bias),
    )


def _conv(
    ours: str, theirs: str, dims: str, part: int = 0, parts: tuple[str, ...] = ()
) -> tuple[Row, ...]:
    """Kernel and bias of GPT-2's `Conv1D`, whose kernel is not transposed."""
    ours, theirs = f"blocks.{ours}", f"transformer.h.{{}}.{theirs}"
    outputs = dims.rpartition("|")[2]
    return (
        Row(f"{ours}.kernel", f"{theirs}.weight", dims, False, part, parts),
        Row(f"{ours}.bias", f"{theirs}.bias", outputs, False, part, parts),
    )


def _layer_norm(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        Row(f"{ours}.scale", f"{theirs}.weight", "embed"),
        Row(f"{ours}.bias", f"{theirs}.bias", "embed"),
    )


def _rms_norm(
    ours: str, theirs: str, dims: str = "embed", needs: str = ""
) -> tuple[Row, ...]:
    ours, theirs = f"blocks.{ours}.scale", f"{_LAYER}.{theirs}.weight"
    return (Row(ours, theirs, dims, needs=needs),)


def _query_key_norms(query_dims: str, key_dims: str) -> tuple[Row, ...]:
    query, key = "attention.query_norm", "attention.key_norm"
    return (
        *_rms_norm(query, "self_attn.q_norm", query_dims, "query_key_norm"),
        *_rms_norm(key, "self_attn.k_norm", key_dims, "query_key_norm"),
    )


_EMBEDDING = (Row("embedding.tokens", "model.embed_tokens.weight", "vocab | embed"),)
_FROM_STREAM = (
    ("attention.query", "self_attn.q_proj", "embed | heads head"),
    ("attention.key", "self_attn.k_proj", "embed | kv_heads head"),
    ("attention.value", "self_attn.v_proj", "embed | kv_heads head"),
)
_OUT = _linear(
    "attention.out", "self_attn.o_proj", "heads head | embed", bias="has_output_bias"
)
_ATTENTION = (
    *(row for x in _FROM_STREAM for row in _linear(*x, bias="has_input_bias")),
    *_OUT,
)
_JOINED_ATTENTION = (
    *(
        row
        for part, (ours, _, dims) in enumerate(_FROM_STREAM)
        for row in _linear(
            *(ours, "self_attn.qkv_proj", dims),
            bias="has_input_bias",
            part=part,
            parts=_INPUTS,
        )
    ),
    *_OUT,
)
_DOWN = _linear("mlp.down", "mlp.down_proj", "mlp | embed")
_MLP = (
    *_linear("mlp.gate", "mlp.gate_proj", "embed | mlp"),
    *_linear("mlp.up", "mlp.up_proj", "embed | mlp"),
    *_DOWN,
)
_JOINED_MLP = (
    *_linear("mlp.gate", "mlp.gate_up_proj", "embed | mlp", parts=("mlp", "mlp")),
    *_linear("mlp.up", "mlp.gate_up_proj", "embed | mlp", part=1, parts=("mlp", "mlp")),
    *_DOWN,
)
_INPUT_NORMS = (
    *_rms_norm("attention_norm", "input_layernorm"),
    *_rms_norm("mlp_norm", "post_attention_layernorm"),
)
_HEAD = (
    Row("head.norm.scale", "model.norm.weight", "embed"),
    Row("head.kernel", "lm_head.weight", "vocab | embed", unless="tied_head"),
)
LLAMA: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_ATTENTION),
    *(*_query_key_norms("head", "head"), *_MLP, *_HEAD),
)
"""Llama, Mistral, Qwen2 and Qwen3."""
PHI3: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_JOINED_ATTENTION, *_JOINED_MLP, *_HEAD),
)
"""Phi-3 and Phi-4, with joined inputs."""
OLMO2: tuple[Row, ...] = (
    *(*_EMBEDDING, *_ATTENTION, *_query_key_norms("heads head", "kv_heads head")),
    *_rms_norm("attention_norm", "post_attention_layernorm"),
    *_rms_norm("mlp_norm", "post_feedforward_layernorm"),
    *(*_MLP, *_HEAD),
)
"""OLMo 2, which normalises outputs."""
GEMMA: tuple[Row, ...] = (
    *(*_EMBEDDING, *_ATTENTION, *_query_key_norms("head", "head")),
    *_rms_norm("attention_norm", "input_layernorm"),
    *_rms_norm("attention_output_norm", "post_attention_layernorm"),
    *_rms_norm("mlp_norm", "pre_feedforward_layernorm"),
    *_rms_norm("mlp_output_norm", "post_feedforward_layernorm"),
    *(*_MLP, *_HEAD),
)
"""Gemma 2 and 3, which normalise inputs and outputs."""
GPT2: tuple[Row, ...] = (
    Row("embedding.tokens", "transformer.wte.weight", "vocab | embed"),
    Row("embedding.positions", "transformer.wpe.weight", "length | embed"),
    *_layer_norm("blocks.attention_norm", "transformer.h.{}.ln_1"),
    *(
        row
        for part, (ours, _, dims) in enumerate(_FROM_STREAM)
        for row in _conv(ours, "attn.c_attn", dims, part, _INPUTS)
    ),
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
