"""Grows checkpoints at a start: new vocabulary rows, or experts from dense weights."""

import concurrent.futures
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.settings.mixture import experts_by_layer, segment_shapes
from zjax.weights import layers
from zjax.weights.adapters import Drawn, Initial
from zjax.weights.files import tensor_name
from zjax.weights.source import Entry, Index, Source, name_leaves

TABLES = ("embedding/tokens", "head/kernel", "head/bias")
"""Arrays of the built-in models with one row per token id."""
_SLAB_ROWS = 4_096
"""Rows of a table that are read at once for the mean."""


VALUE = "head/value"
"""Path of the head of values."""


def with_values(source: Source, wanted: Mapping[str, Entry]) -> Source:
    """Adds a head of values that are 0, where a checkpoint has none and one is wanted.

    Example:
        >>> wanted = {"head.value": Entry((4,), "float32")}
        >>> empty = Source({}, lambda name, index: np.zeros(()))
        >>> with_values(empty, wanted).read_all("head.value").tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    name = tensor_name(VALUE)
    if name not in wanted or name in source.entries:
        return source

    def read(name: str, index: Index) -> np.ndarray:
        shape = [x.stop - x.start for x in index]
        return np.zeros(shape, wanted[name].dtype)

    return source.joined(Source({name: wanted[name]}, read))


def resized(
    source: Source,
    wanted: Mapping[str, Entry],
    checkpoint: schema.Checkpoint,
    size: int,
    is_frozen: Callable[[str], bool],
) -> Source:
    """Adds rows (means of saved rows) to tables of tokens up to a size, if asked."""
    path = checkpoint.init_from
    names = {tensor_name(x): x for x in TABLES if tensor_name(x) in source.entries}
    names = {name: x for name, x in names.items() if name in wanted}
    if not checkpoint.resize_vocabulary:
        return source
    if not names:
        raise _useless(
            f"finds no table of tokens in checkpoint.init_from={path!r} "
            "that the model has"
        )
    old, *_ = map(source.entries.get, names)
    assert old is not None
    if old.shape[0] >= size:
        raise _useless(
            f"has no new rows: checkpoint.init_from={path!r} has "
            f"{old.shape[0]} tokens, model.vocab_size is {size}"
        )
    frozen = [name for name in names.values() if is_frozen(name)]
    _report(path, old.shape[0], size, [*names.values()], frozen)

    @functools.cache
    def mean(name: str) -> np.ndarray:
        rows, *others = source.entries[name].shape
        spans = [slice(0, n) for n in others]
        total = np.zeros(others)
        for first in range(0, rows, _SLAB_ROWS):
            slab = slice(first, min(first + _SLAB_ROWS, rows))
            # float64, as a table has 100,000s of rows.
            total += source.read(name, (slab, *spans)).sum(0, np.float64)
        return total / rows

    def read(name: str, index: Index) -> np.ndarray:
        # A slice may hold saved rows, new rows, or both.
        rows, *others = index
        count = source.entries[name].shape[0]
        known = slice(min(rows.start, count), min(rows.stop, count))
        found = source.read(name, (known, *others))
        num_new = rows.stop - rows.start - len(found)
        new = mean(name)[tuple(others)].astype(found.dtype)
        return np.concatenate([found, np.broadcast_to(new, (num_new, *new.shape))])

    grown = {n: source.entries[n] for n in names}
    entries = {n: Entry((size, *x.shape[1:]), x.dtype) for n, x in grown.items()}
    return source.joined(Source(entries, read))


def _useless(problem: str) -> ConfigError:
    """Returns the error for a `resize_vocabulary` without effect."""
    remedy = "set it to False"
    return ConfigError(Problem("checkpoint.resize_vocabulary", True, problem, remedy))


def _report(
    path: str, num_old: int, size: int, tables: list[str], frozen: list[str]
) -> None:
    """Warns on process 0 of new rows, and of grown tables that stay frozen."""
    if jax.process_index() != 0:
        return
    note = f"; frozen are {', '.join(frozen)}: lora.also_train trains them"
    logging.warning(
        "checkpoint.init_from=%r has %d tokens, and model.vocab_size=%d: new rows of "
        "%s are the mean of the others%s",
        *(path, num_old, size, ", ".join(tables), note if frozen else ""),
    )


_BLOCK = re.compile(
    r"blocks(\.segment(?P<segment>\d+))?(\.layer(?P<layer>\d+))?\.(?P<array>.+)"
)
"""Splits a tensor name into segment, layer of a block, and path in the layer."""
_EXPERTS = "mlp.experts."
_RESIDUAL = "mlp.residual."
_SILENT = "mlp.shared.down."
"""Starts as 0, so that new shared experts add nothing at first."""
_NEW = ("mlp.router.", "mlp.coefficient.", "mlp.shared.", "mlp.shared_gate.")
"""Arrays that no dense model has."""


def initial_values(init: Callable[[jax.Array], Any], key: jax.Array) -> Initial:
    """Returns a factory of functions that draw arrays of a new model in a thread.

    `init` returns the parameters of the model first.
    """

    def initial(names: Sequence[str]) -> Callable[[], Drawn]:
        def chosen(key: jax.Array) -> dict[str, jax.Array]:
            params = name_leaves(init(key)[0])
            named = {tensor_name(name): x for name, x in params.items()}
            return {name: named[name] for name in names}

        # Lowered here, as JAX's config contexts are thread-local; compiling takes
        # longer and runs in the thread.
        lowered = jax.jit(chosen).lower(key)

        @functools.cache
        def draw() -> Drawn:
            thread = concurrent.futures.ThreadPoolExecutor(1, "initial")
            return thread.submit(lambda: jax.device_get(lowered.compile()(key)))

        return draw

    return initial


def upcycled(
    source: Source,
    wanted: Mapping[str, Entry],
    model: schema.Model,
    checkpoint: schema.Checkpoint,
    seed: int,
    initial: Initial,
) -> Source:
    """Grows experts (layers stacked) from a dense model; else returns `source`.

    `seed` draws the noise on the experts.
    """
    if not model.moe:
        return source
    if any(_EXPERTS in name for name in source.entries):
        _check_noise(checkpoint)
        return source
    dense = layers.untiled(source)
    dense = layers.restacked(dense, list(layers.stack_all(dense.entries)))
    _check_shape(dense.entries, model, model.moe, checkpoint.init_from)
    new = layers.stack_all(wanted)
    view = _Upcycled(dense, new, model, model.moe, checkpoint, seed, initial)
    if jax.process_index() == 0:
        logging.warning("%s", view.describe())
    return Source(view.entries, view.read)


def _check_noise(checkpoint: schema.Checkpoint) -> None:
    """Refuses `expert_noise` for a checkpoint that has experts already."""
    noise, path = checkpoint.expert_noise, checkpoint.init_from
    if noise:
        problem = f"has no effect on the experts of checkpoint.init_from={path!r}"
        remedy = "leave it at 0.0"
        raise ConfigError(Problem("checkpoint.expert_noise", noise, problem, remedy))


def _check_shape(
    dense: Mapping[str, Entry], model: schema.Model, moe: schema.MoE, path: str
) -> None:
    """Refuses a dense model with another depth or width than the mixture needs."""
    kernel = dense.get("blocks.mlp.up.kernel")
    if kernel is None or len(kernel.shape) != 3:
        return  # not a built-in model, as a check of names reports
    num_layers, width, hidden = kernel.shape
    pairs = [
        ("num_layers", model.num_layers, num_layers, "number of layers"),
        ("embed_size", model.embed_size, width, "width"),
        ("moe.expert_size", moe.expert_size, hidden, "feed-forward width"),
    ]
    # Layers that stay dense must have the width of the checkpoint, too.
    if 0 in experts_by_layer(model):
        pairs.append(("mlp_size", model.mlp_size, hidden, "feed-forward width"))
    problems = [
        Problem(
            f"model.{name}",
            int(value),
            f"is not the {what} {found} of checkpoint.init_from={path!r}",
            f"use {found}",
        )
        for name, value, found, what in pairs
        if value != found
    ]
    if problems:
        raise ConfigError(*problems)


class _Upcycled:
    """Entries and slices of a mixture of experts, read from a dense model."""

    def __init__(
        self,
        dense: Source,
        wanted: Mapping[str, Entry],
        model: schema.Model,
        moe: schema.MoE,
        checkpoint: schema.Checkpoint,
        seed: int,
        initial: Initial,
    ):
        self.dense, self.model, self.moe, self.seed = dense, model, moe, seed
        self.noise, self.path = checkpoint.expert_noise, checkpoint.init_from
        self.numbers = _layer_numbers(model)
        self.new = [n for n in wanted if _array_of(n).startswith(_NEW)]
        drawn = [n for n in self.new if not _array_of(n).startswith(_SILENT)]
        self.draw = initial(drawn)
        entries, used = {name: wanted[name] for name in self.new}, set()
        for name, entry in wanted.items():
            parts = self.parts(name) if _array_of(name) and name not in entries else []
            if parts and all(part in dense.entries for part in parts):
                entries[name] = self._entry(name, entry)
                used.update(parts)
        # Unused dense arrays stay, so that the check of names reports such arrays.
        unused = {n: e for n, e in dense.entries.items() if n not in used}
        self.entries = unused | entries

    def parts(self, name: str) -> list[str]:
        """Names of dense arrays behind one array of the mixture, gate before value."""
        array = _array_of(name)
        if array.startswith(_RESIDUAL):
            array = array.replace(_RESIDUAL, "mlp.")
        elif array.startswith(_EXPERTS):
            array = array.replace(_EXPERTS, "mlp.")
            if self.model.is_gated and ".up." in array:
                return [f"blocks.{x}" for x in (array.replace(".up.", ".gate."), array)]
        return [f"blocks.{array}"]

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice of an array of the mixture."""
        # Draws before any return: drawing overlaps with reading.
        values, array = self.draw(), _array_of(name)
        if not array:
            return self.dense.read(name, index)
        if array.startswith(_SILENT):
            shape = [s.stop - s.start for s in index]
            return np.zeros(shape, self.entries[name].dtype)
        if name in self.new:
            return values.result()[name][index]
        layer_numbers, rest = self.numbers[_place_of(name)][index[0]], index[1:]
        parts = self.parts(name)
        if array.startswith(_EXPERTS):
            return np.stack([self._experts(parts, n, *rest) for n in layer_numbers])
        return np.stack([self._layer(parts[0], n, rest) for n in layer_numbers])

    def describe(self) -> str:
        """Says which arrays are copies, which are new, and how the outputs differ."""
        moe, path = self.moe, self.path
        experts = [n for n in experts_by_layer(self.model) if n]
        new = ", ".join(self.new)
        return (
            f"checkpoint.init_from={path!r} is a dense model: the {_span(experts)} "
            "experts of a layer are copies of its feed-forward"
            f"{', and so is the residual branch' if moe.residual else ''}; new are "
            f"{new}; all other arrays are copied; "
            f"{_describe_function(moe, self.noise)}"
        )

    def _entry(self, name: str, wanted: Entry) -> Entry:
        """Shape and dtype of an array that is made from dense arrays."""
        first = self.dense.entries[self.parts(name)[0]]
        shape = (len(self.numbers[_place_of(name)]), *first.shape[1:])
        if _array_of(name).startswith(_EXPERTS):
            # A gated expert holds gate and value in one kernel.
            gates = () if len(self.parts(name)) == 1 else (2,)
            num_experts, rest = wanted.shape[1], shape[1:]
            shape = (shape[0], num_experts, *rest[:-1], *gates, rest[-1])
        return Entry(shape, first.dtype)

    def _layer(self, part: str, number: int, index: Sequence[slice]) -> np.ndarray:
        """Reads a slice of one layer of a dense array."""
        return self.dense.read(part, (slice(number, number + 1), *index))[0]

    def _experts(
        self, parts: Sequence[str], number: int, experts: slice, *index: slice
    ) -> np.ndarray:
        """Reads a slice [experts, ...] of the experts of one layer."""
        if self.noise and parts[0].endswith("kernel"):
            return self._noisy(parts, number, experts, index)
        if len(parts) > 1:
            *outer, gates, hidden = index
            each = [self._layer(x, number, (*outer, hidden)) for x in parts[gates]]
            one = np.stack(each, -2)
        else:
            one = self._layer(parts[0], number, index)
        # A view: without noise all experts are equal.
        return np.broadcast_to(one, (experts.stop - experts.start, *one.shape))

    def _noisy(
        self, parts: Sequence[str], number: int, experts: slice, index: Sequence[slice]
    ) -> np.ndarray:
        """Reads experts with noise that depends on layer, expert and array only."""

        def copy(part: str, expert: int) -> np.ndarray:
            # Whole matrices are drawn, so that noise does not depend on the slice.
            everything = [slice(0, n) for n in self.dense.entries[part].shape[1:]]
            matrix = self._layer(part, number, everything)
            wide = matrix.astype(np.float32)
            # crc32, since `hash` of a text differs between processes.
            words = self.seed, zlib.crc32(part.encode()), number, expert
            noise = np.random.default_rng(words).standard_normal(
                matrix.shape, np.float32
            )
            scale = self.noise * wide.std()
            return (wide + scale * noise).astype(matrix.dtype)

        copies = []
        for expert in range(experts.start, experts.stop):
            each = [copy(part, expert) for part in parts]
            joined = np.stack(each, -2) if len(each) > 1 else each[0]
            copies.append(joined[tuple(index)])
        return np.stack(copies)


def _array_of(name: str) -> str:
    """Path of an array inside a layer; empty outside of layers."""
    block = _BLOCK.fullmatch(name)
    return block["array"] if block else ""


def _place_of(name: str) -> tuple[int, int]:
    """Indices of the segment, and of the layer inside a block."""
    block = _BLOCK.fullmatch(name)
    assert block is not None
    return int(block["segment"] or 0), int(block["layer"] or 0)


def _layer_numbers(model: schema.Model) -> dict[tuple[int, int], range]:
    """Numbers of the layers that an array stacks, by the result of `_place_of`.

    Example:
        >>> moe = schema.TokenChoice(num_experts=8, every=2, first_dense=1)
        >>> _layer_numbers(schema.Model(num_layers=5, moe=moe))[1, 1]
        range(2, 6, 2)
    """
    numbers, first = {}, 0
    for segment, shape in enumerate(segment_shapes(model)):
        size, num_blocks = len(shape.layers), shape.num_blocks
        for layer in range(size):
            start = first + layer
            numbers[segment, layer] = range(start, start + size * num_blocks, size)
        first += size * num_blocks
    return numbers


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _describe_function(moe: schema.MoE, noise: float) -> str:
    """Says whether the mixture computes the dense model at first, and if not, why."""
    reasons = [*_differences(moe, noise)]
    if reasons:
        return f"it differs from the dense model at first, by {' and '.join(reasons)}"
    return "it computes what the dense model does at first"


def _differences(moe: schema.MoE, noise: float) -> Iterator[str]:
    """Yields the settings by which a mixture differs from the dense model at first."""
    if not isinstance(moe, schema.TokenChoice):
        yield "model.moe='expert_choice'"
    elif moe.top_k == 1:
        yield "model.moe.top_k=1, which weighs an expert by its score"
    elif not moe.normalise:
        yield "model.moe.normalise=False"
    if moe.scale != 1:
        yield f"model.moe.scale={moe.scale}"
    if isinstance(moe, schema.TokenChoice) and moe.drop != "none":
        yield f"model.moe.drop={moe.drop!r}"
    if noise:
        yield f"checkpoint.expert_noise={noise}"
