"""Maps arrays of the model to tensors of a Hugging Face checkpoint.

An array lies in one tensor, in a part of a tensor that joins several arrays, or in many
tensors, such as one for each expert. One table serves both directions: weights are read
slice by slice, and written whole.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from zjax.settings import choices, schema
from zjax.settings.mixture import experts_by_layer, segment_shapes
from zjax.weights.source import Entry, Index, Source

Read = Callable[[str, Index], np.ndarray]
"""Function that reads a slice of a tensor by its name."""


def _sum_of(*settings: str) -> Callable[[schema.Model], int]:
    """Function from a model to the sum of settings."""
    return lambda model: sum(operator.attrgetter(*settings)(model))


_SIZES: Mapping[str, Callable[[schema.Model], int]] = {
    "embed": operator.attrgetter("embed_size"),
    "mlp": operator.attrgetter("mlp_size"),
    "heads": operator.attrgetter("num_heads"),
    "kv_heads": operator.attrgetter("num_kv_heads"),
    "head": operator.attrgetter("head_size"),
    "vocab": operator.attrgetter("vocab_size"),
    "hidden": operator.attrgetter("embed_size"),
    "positions": operator.attrgetter("num_positions"),
    "types": operator.attrgetter("num_token_types"),
    "experts": lambda model: max(experts_by_layer(model)),
    "expert_mlp": operator.attrgetter("moe.expert_size"),
    "gates": lambda _: 2,
    "shared": lambda model: math.prod(
        operator.attrgetter("moe.num_shared", "moe.expert_size")(model)
    ),
    "query_latent": operator.attrgetter("latent.query_rank"),
    "key_latent": operator.attrgetter("latent.key_rank"),
    "turned_key_latent": _sum_of("latent.key_rank", "rotary.size"),
    "key_value": _sum_of("latent.plain_size", "latent.value_size"),
    "value": operator.attrgetter("value_size"),
}
"""Sizes of dims by name; `gates` are the gate and the value of a gated expert, `hidden`
the outputs of a matrix with `embed` inputs, and `shared` the hidden channels of all
shared experts. `turned_key_latent` adds the rotated channels of keys, and `key_value`
joins the other channels of keys with the channels of values."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of a table: one array of the model, and the place in a checkpoint.

    Args:
        ours: Path of the array in the model, with dots.
        theirs: Name of the tensor; `{layer}` is the number of the layer, and a dim in
            braces the index of the tensor along that dim.
        dims: Names of the array's dims; `|` ends the dims that are one dim of the
            tensor.
        tensor: Dims in the order of the tensor, if different. A dim that the tensor
            lacks has a tensor for each index.
        part: Index of the array in a tensor that joins several arrays.
        parts: Dims along which the tensor joins arrays, by part; () for one array.
        gates: Names of the tensors of gates and values, if separate.
        needs: Attribute of the settings that the array requires.
        unless: Attribute of the settings that excludes the array.
        layers: Layers with the array: `all`, or only layers with or without experts.
    """

    ours: str
    theirs: str
    dims: str
    tensor: str = ""
    part: int = 0
    parts: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    needs: str = ""
    unless: str = ""
    layers: Literal["all", "dense", "mixture"] = "all"

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of dims, grouped by dim of the tensor."""
        groups = (self.tensor or self.dims).split("|")
        return tuple(tuple(group.split()) for group in groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of dims in the order of the array."""
        return tuple(self.dims.replace("|", " ").split())

    @property
    def apart(self) -> tuple[str, ...]:
        """Dims that the tensor lacks."""
        held = {*itertools.chain(*self.groups)}
        return tuple(name for name in self.names if name not in held)

    @property
    def order(self) -> tuple[str, ...]:
        """Dims in file order: dims that tensors lack, then dims of a tensor."""
        return (*self.apart, *itertools.chain(*self.groups))

    @property
    def is_transposed(self) -> bool:
        """Whether the tensor has dims in another order, as a torch `Linear`."""
        return self.order != self.names

    def exists(self, model: schema.Model) -> bool:
        """Whether a model has the array."""

        def has(name: str) -> bool:
            return bool(choices.value_at(model, name))

        is_there = not self.needs or has(self.needs)
        return is_there and not (self.unless and has(self.unless))

    def is_in(self, num_experts: int) -> bool:
        """Whether a layer with so many experts has the array."""
        return self.layers == "all" or (self.layers == "mixture") == (num_experts > 0)


def _sizes(model: schema.Model, names: Iterable[str]) -> dict[str, int]:
    return {name: _SIZES[name](model) for name in names}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Maps the elements of one array to tensors.

    Args:
        sizes: Sizes of the array's dims by name, in order.
        joined: Sizes of all arrays of a tensor along the joined dim; () for one array.
        tensors: Names of the tensors, by indices along the dims that tensors lack.
    """

    row: Row
    sizes: Mapping[str, int]
    joined: tuple[int, ...]
    tensors: Mapping[tuple[int, ...], str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.sizes.values())

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor."""
        shape = [math.prod(self.sizes[n] for n in group) for group in self.row.groups]
        if self.joined:
            shape[self.axis] = sum(self.joined)
        return tuple(shape)

    @property
    def first(self) -> str:
        """Name of the first tensor."""
        return next(iter(self.tensors.values()))

    @property
    def axis(self) -> int:
        """Dim of a tensor along which arrays are joined."""
        row = self.row
        own = row.parts[row.part] if row.parts else " ".join(row.groups[0])
        return row.groups.index(tuple(own.split()))

    def read(self, index: Index, read: Read) -> np.ndarray:
        """Reads a slice of the array, as a transposed view of file order."""
        spans = dict(zip(self.sizes, index, strict=True))
        ranges = [range(spans[n].start, spans[n].stop) for n in self.row.apart]
        places = itertools.product(*ranges)
        found = [self._read_tensor(spans, self.tensors[x], read) for x in places]
        # One tensor is not copied.
        array = np.stack(found) if found[1:] else found[0]
        array = array.reshape(*map(len, ranges), *found[0].shape)
        # A view: `weights.pieces` transposes on the device.
        return array.transpose([self.row.order.index(name) for name in self.sizes])

    def _read_tensor(
        self, spans: Mapping[str, slice], tensor: str, read: Read
    ) -> np.ndarray:
        """Reads a slice of one tensor in file order, with merged dims split."""
        merged, inner, shape = list[slice](), list[slice](), list[int]()
        for first, *others in self.row.groups:
            size = math.prod(self.sizes[name] for name in others)
            span = spans[first]
            # A file slice cuts only the first of merged dims; `inner` cuts inner dims.
            merged.append(slice(span.start * size, span.stop * size))
            inner += [slice(None), *(spans[name] for name in others)]
            shape += [span.stop - span.start, *(self.sizes[name] for name in others)]
        span, start = merged[self.axis], sum(self.joined[: self.row.part])
        merged[self.axis] = slice(span.start + start, span.stop + start)
        return read(tensor, tuple(merged)).reshape(shape)[tuple(inner)]

    def piece_of(self, array: np.ndarray, place: tuple[int, ...]) -> np.ndarray:
        """Returns the part of a whole array that one tensor holds."""
        names, order = self.row.names, self.row.order
        ordered = array.transpose([names.index(name) for name in order])
        shape = [math.prod(self.sizes[n] for n in group) for group in self.row.groups]
        return ordered[place].reshape(shape)


def layouts_of(
    rows: tuple[Row, ...], model: schema.Model
) -> Iterator[tuple[str, Layout]]:
    """Yields name and layout of each array of a model.

    Layers are apart, under names such as `blocks.mlp.up.kernel[0]`, in the order of the
    model's blocks.
    """
    places = [*zip(_places(model), experts_by_layer(model), strict=True)]
    for row in rows:
        if not row.exists(model):
            continue
        if not row.ours.startswith("blocks."):
            yield row.ours, _layout(row, model)
            continue
        for layer, ((block, number), num_experts) in enumerate(places):
            if row.is_in(num_experts):
                ours = row.ours.replace("blocks.", block, 1)
                yield f"{ours}[{number}]", _layout(row, model, layer)


def _layout(row: Row, model: schema.Model, layer: int = 0) -> Layout:
    """Layout of a row for one layer of a model."""
    sizes = _sizes(model, row.names)
    ranges = [range(sizes[name]) for name in row.apart]
    tensors = dict[tuple[int, ...], str]()
    for place in itertools.product(*ranges):
        labels: dict[str, Any] = dict(zip(row.apart, place, strict=True))
        if row.gates:
            labels["gates"] = row.gates[labels["gates"]]
        tensors[place] = row.theirs.format(layer=layer, **labels)
    parts = [_sizes(model, part.split()) for part in row.parts]
    joined = tuple(math.prod(part.values()) for part in parts)
    return Layout(row, sizes, joined, tensors)


def _places(model: schema.Model) -> Iterator[tuple[str, int]]:
    """Yields, for each layer, the name of the stack and the index in the stack."""
    shapes = segment_shapes(model)
    for segment, shape in enumerate(shapes):
        # Segments and layers of a block have names only where there are several.
        name = f"blocks.segment{segment}." if shapes[1:] else "blocks."
        for block in range(shape.num_blocks):
            for layer in range(len(shape.layers)):
                yield f"{name}layer{layer}." if shape.layers[1:] else name, block


def from_tensors(source: Source, layouts: Mapping[str, Layout]) -> Source:
    """Returns the arrays of a model, read from slices of tensors."""
    entries = {
        ours: Entry(layout.shape, source.entries[layout.first].dtype)
        for ours, layout in layouts.items()
    }
    return Source(entries, lambda name, i: layouts[name].read(i, source.read))


def to_tensors(source: Source, layouts: Mapping[str, Layout]) -> Source:
    """Returns tensors, made of the arrays of a model; the inverse of `from_tensors`."""
    parts = dict[str, dict[int, tuple[str, tuple[int, ...]]]]()
    for ours, layout in layouts.items():
        for place, tensor in layout.tensors.items():
            parts.setdefault(tensor, {})[layout.row.part] = ours, place
    # The first part of a tensor sets the dtype.
    first = {tensor: next(iter(x.values()))[0] for tensor, x in parts.items()}
    entries = {
        tensor: Entry(layouts[ours].tensor_shape, source.entries[ours].dtype)
        for tensor, ours in first.items()
    }

    def read(tensor: str, index: Index) -> np.ndarray:
        arrays = [
            layouts[ours].piece_of(source.read_all(ours), place)
            for _, (ours, place) in sorted(parts[tensor].items())
        ]
        axis = layouts[first[tensor]].axis
        whole = np.concatenate(arrays, axis) if arrays[1:] else arrays[0]
        return whole[index]

    return Source(entries, read)
