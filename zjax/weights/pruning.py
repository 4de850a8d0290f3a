"""Starts from some layers and channels of a larger model, read slice by slice.

Reference:
    Muralidharan et al., Minitron (arXiv:2407.14679).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zjax.errors import Problem
from zjax.settings import choices, mixture, prune, schema
from zjax.sharding.naming import path_of
from zjax.typing import Model
from zjax.weights import layers
from zjax.weights.files import tensor_name
from zjax.weights.source import Index, Source

Numbers = tuple[int, ...]
"""Ascending numbers of kept parts."""
Scores = np.ndarray | jax.Array
"""Importance of parts; float32 or float64."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Parts of a larger model that a smaller model starts from; None keeps all.

    Args:
        layers: Kept layers.
        channels: Kept channels of the residual stream, for all layers.
        groups: Kept groups of heads that share keys and values, by kept layer.
        hidden: Kept channels of feed-forwards, by kept layer.
        experts: Kept experts, by kept layer.
        heads_per_group: Heads of a group.
    """

    layers: Numbers
    channels: Numbers | None = None
    groups: tuple[Numbers, ...] | None = None
    hidden: tuple[Numbers, ...] | None = None
    experts: tuple[Numbers, ...] | None = None
    heads_per_group: int = 1


class Importance(NamedTuple):
    """Importance of the parts of a model; parts of the largest importance stay."""

    layers: Scores
    """[N], mean over tokens of 1 - cos of the stream before and after each layer."""
    channels: Scores
    """[M], mean absolute value of channels that enter attention and feed-forwards."""
    groups: Scores
    """[N, KV], mean Euclidean norm of the outputs of a group's heads."""
    hidden: Scores
    """[N, F], mean absolute value of what enters the last matrix of a feed-forward; no
    columns for a mixture."""
    experts: Scores
    """[N, E], fraction of the tokens that choose each expert; no columns without."""


_SIZES = ("num_layers", "embed_size", "mlp_size", "num_heads", "num_kv_heads")
"""Settings of the model that pruning makes smaller, besides the number of experts."""
_EQUAL = (
    "vocab_size",
    "head_size",
    "query_key_norm",
    "query_key_norm_scope",
    "norm",
    "norm_eps",
    "norm_position",
    "zero_centered_norm",
    "positions",
    "window",
    "attention_soft_cap",
    "attention_sinks",
    "logit_soft_cap",
    "query_scale_size",
    "scaled_embedding",
    "activation",
    "use_bias",
    "attention_bias",
    "tied_head",
)
"""Settings that change what equal weights compute, or the shapes of tables."""


def misfits(
    large: schema.Model, small: schema.Model, settings: prune.Prune, path: str
) -> list[Problem]:
    """Lists reasons why a model cannot start from parts of the model of a path."""
    return [
        *_unsupported(large, path),
        *_different(large, small, path),
        *_larger(large, small, path),
        *_unlisted(large, small, settings.layers, path),
        *_unread(large, small, settings, path),
    ]


def measures(large: schema.Model, small: schema.Model, settings: prune.Prune) -> bool:
    """Whether the choice of what stays needs a measurement."""
    is_shallower = small.num_layers < large.num_layers
    by_influence = isinstance(settings.layers, prune.Influence)
    return _is_narrower(large, small) or (is_shallower and by_influence)


def _unsupported(large: schema.Model, path: str) -> Iterator[Problem]:
    """Yields kinds of models of which no parts can be taken."""

    def problem(text: str, remedy: str) -> Problem:
        return Problem("checkpoint.init_from", path, text, remedy)

    if large.kind != "decoder":
        yield problem("is an encoder, which prune does not take", "use a decoder")
    if large.latent:
        text = "has model.latent, whose shared keys have no heads to take"
        yield problem(text, "use a model without latent attention")
    shapes = mixture.segment_shapes(large)
    if len(shapes) > 1 or any(len(x.layers) > 1 for x in shapes):
        text = "has layers of several kinds, and prune takes layers of one kind"
        yield problem(text, "use a model whose layers are alike")


def _different(
    large: schema.Model, small: schema.Model, path: str
) -> Iterator[Problem]:
    """Yields settings of the smaller model that the larger model does not have."""
    for name in (*_EQUAL, *_tables_of(large)):
        theirs, ours = _compared(large, name), _compared(small, name)
        # By default the scale follows the head size, which is told already.
        follows = name == "query_scale_size" and small.head_size == ours
        if theirs != ours and not follows:
            problem = f"is {theirs!r} in checkpoint.init_from={path!r}"
            yield Problem(f"model.{name}", ours, problem, f"use {theirs!r}")
    ratio = large.num_heads // large.num_kv_heads
    if small.num_heads != ratio * small.num_kv_heads:
        problem = f"leaves no whole groups: {ratio} heads share keys and values in "
        problem += f"checkpoint.init_from={path!r}"
        remedy = f"use {ratio} times model.num_kv_heads={small.num_kv_heads}"
        yield Problem("model.num_heads", int(small.num_heads), problem, remedy)
    if _without_number(large.moe) != _without_number(small.moe):
        problem = f"has other experts than checkpoint.init_from={path!r}"
        remedy = "change nothing but num_experts"
        yield Problem("model.moe", choices.value_at(small, "moe"), problem, remedy)
    if large.scaled_embedding and small.embed_size != large.embed_size:
        problem = "would scale the kept channels by another factor than "
        problem += f"checkpoint.init_from={path!r}"
        remedy = f"use {large.embed_size}"
        yield Problem("model.embed_size", int(small.embed_size), problem, remedy)


def _tables_of(large: schema.Model) -> tuple[str, ...]:
    """Names the setting that a table of learned positions follows."""
    return ("max_length",) if isinstance(large.positions, schema.Learned) else ()


def _compared(model: schema.Model, name: str) -> Any:
    """Returns what two models must share; rotations are equal at any longest text."""
    value = getattr(model, name)
    if isinstance(value, schema.Rotary):
        return dataclasses.replace(value, max_positions=0)
    return value


def _larger(large: schema.Model, small: schema.Model, path: str) -> Iterator[Problem]:
    """Yields sizes above the larger model's, and a model that is not smaller at all."""
    pairs = sizes(large, small)
    for name, (theirs, ours) in pairs.items():
        if ours > theirs:
            problem = f"is more than the {theirs} of checkpoint.init_from={path!r}"
            yield Problem(f"model.{name}", ours, problem, f"use at most {theirs}")
    if all(ours == theirs for theirs, ours in pairs.values()):
        problem = (
            f"takes nothing away: model is as large as checkpoint.init_from={path!r}"
        )
        remedy = "set it to None, or use fewer or narrower layers"
        yield Problem("prune", "prune", problem, remedy)


def _unlisted(
    large: schema.Model, small: schema.Model, kept: Any, path: str
) -> Iterator[Problem]:
    """Yields a list of layers that does not fit the two models."""
    if not isinstance(kept, prune.Listed):
        return
    field, numbers = "prune.layers.numbers", kept.numbers
    if list(numbers) != sorted({*numbers}) or min(numbers, default=0) < 0:
        yield Problem(field, numbers, "are not ascending from 0", "sort them")
    elif len(numbers) != small.num_layers:
        problem = (
            f"lists {len(numbers)} layers, and model.num_layers={small.num_layers}"
        )
        yield Problem(field, numbers, problem, f"list {small.num_layers}")
    elif max(numbers) >= large.num_layers:
        problem = f"names a layer that checkpoint.init_from={path!r} does not have"
        yield Problem(field, numbers, problem, f"use 0 to {large.num_layers - 1}")


def _unread(
    large: schema.Model, small: schema.Model, settings: prune.Prune, path: str
) -> Iterator[Problem]:
    """Yields settings that choose nothing for the two models."""
    kept = settings.layers
    if small.num_layers == large.num_layers and kept != prune.Prune().layers:
        problem = "chooses no layers: model.num_layers is that of "
        problem += f"checkpoint.init_from={path!r}"
        yield Problem("prune.layers", kept.kind, problem, "leave it out")
    default = prune.Prune().num_rows
    if settings.num_rows != default and not measures(large, small, settings):
        problem = "is read by no measurement"
        remedy = f"leave it at {default}, or set prune.layers='influence'"
        yield Problem("prune.num_rows", settings.num_rows, problem, remedy)


def _num_experts(model: schema.Model) -> int:
    """Experts of a layer, 0 without."""
    return mixture.experts_by_layer(model)[-1]


def _without_number(moe: schema.MoE | None) -> schema.MoE | None:
    """Returns the settings of a mixture but for the number of experts."""
    return dataclasses.replace(moe, num_experts=8) if moe else None


def sizes(large: schema.Model, small: schema.Model) -> dict[str, tuple[int, int]]:
    """Returns pairs of sizes, larger model first, by the name of the setting."""
    pairs = {x: (int(getattr(large, x)), int(getattr(small, x))) for x in _SIZES}
    if large.moe:
        del pairs["mlp_size"]  # no layer reads it
        pairs["moe.num_experts"] = _num_experts(large), _num_experts(small)
    return pairs


def _is_narrower(large: schema.Model, small: schema.Model) -> bool:
    pairs = sizes(large, small)
    del pairs["num_layers"]
    return any(ours < theirs for theirs, ours in pairs.values())


def choose(
    large: schema.Model,
    small: schema.Model,
    settings: prune.Prune,
    importance: Importance | None,
) -> Kept:
    """Chooses the parts that stay.

    `importance` is None where `measures` is False.

    Example:
        >>> settings = prune.Prune(layers=prune.Even())
        >>> large, small = schema.Model(num_layers=12), schema.Model(num_layers=6)
        >>> choose(large, small, settings, None).layers
        (0, 2, 4, 7, 9, 11)
    """
    kept = _kept_layers(large.num_layers, small.num_layers, settings.layers, importance)
    if importance is None:
        return Kept(kept)

    def by_layer(scores: Scores, num_kept: int) -> tuple[Numbers, ...] | None:
        if num_kept >= scores.shape[1]:
            return None
        return tuple(_largest(scores[layer], num_kept) for layer in kept)

    is_narrow = small.embed_size < large.embed_size
    channels = _largest(importance.channels, small.embed_size) if is_narrow else None
    return Kept(
        kept,
        channels,
        by_layer(importance.groups, small.num_kv_heads),
        None if large.moe else by_layer(importance.hidden, small.mlp_size),
        by_layer(importance.experts, _num_experts(small)) if large.moe else None,
        large.num_heads // large.num_kv_heads,
    )


def _kept_layers(
    large: int, small: int, settings: Any, importance: Importance | None
) -> Numbers:
    """Numbers of the layers that stay."""
    if small == large:
        return tuple(range(large))
    if isinstance(settings, prune.Listed):
        return settings.numbers
    if isinstance(settings, prune.Even):
        places = np.linspace(0, large - 1, small) if small > 1 else [large // 2]
        return tuple(int(np.floor(x + 0.5)) for x in places)
    assert importance is not None
    return _largest(importance.layers, small)


def _largest(scores: Scores, number: int) -> Numbers:
    """Ascending places of the largest scores; the first of equal scores stay."""
    order = np.argsort(-np.asarray(scores), kind="stable")[:number]
    return tuple(sorted(order.tolist()))


def named_dims(model: Model) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical names of the dims of a built-in model's arrays."""
    tree = model.logical(None)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_names)
    return {tensor_name(path_of(keys)): names for keys, names in leaves}


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def pruned(
    source: Source, kept: Kept, dims: Mapping[str, Sequence[str | None]]
) -> Source:
    """Returns the kept parts of a larger model's arrays, with layers stacked.

    Args:
        source: Arrays of the larger model, in any layout of layers and tiles.
        kept: Parts that stay.
        dims: Logical names of the dims of each array of the larger model, layers
            stacked, by tensor name.
    """
    whole = layers.untiled(source)
    whole = layers.restacked(whole, list(layers.stack_all(whole.entries)))
    picks = {
        name: _picks(kept, name, names, whole.entries[name].shape)
        for name, names in dims.items()
        if name in whole.entries
    }
    entries = dict(whole.entries)
    for name, picked in picks.items():
        entries[name] = dataclasses.replace(
            entries[name], shape=tuple(x.shape[-1] for x in picked)
        )

    def read(name: str, index: Index) -> np.ndarray:
        if name not in picks:
            return whole.read(name, index)
        picked = picks[name]
        if dims[name][0] != "layers":
            return _take(
                whole, name, [x[i] for x, i in zip(picked, index, strict=True)]
            )
        numbers = range(entries[name].shape[0])[index[0]]
        return np.concatenate(
            [_take(whole, name, _of_layer(picked, number, index)) for number in numbers]
        )

    return Source(entries, read)


def _of_layer(
    picked: Sequence[np.ndarray], number: int, index: Index
) -> list[np.ndarray]:
    """Saved places of a slice of one kept layer, for each dim."""
    layer, *others = picked
    found = [layer[number : number + 1]]
    for places, piece in zip(others, index[1:], strict=True):
        found.append((places[number] if places.ndim > 1 else places)[piece])
    return found


def _take(source: Source, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
    """Reads an array at ascending places of each dim."""
    if any(not len(x) for x in places):
        shape = [len(x) for x in places]
        return np.zeros(
            shape, source.read(name, tuple(slice(0, 0) for _ in places)).dtype
        )
    slab = source.read(name, tuple(slice(int(x[0]), int(x[-1]) + 1) for x in places))
    for dim, x in enumerate(places):
        if len(x) < slab.shape[dim]:
            slab = np.take(slab, x - x[0], axis=dim)
    return slab


def _picks(
    kept: Kept, name: str, dims: Sequence[str | None], shape: tuple[int, ...]
) -> list[np.ndarray]:
    """Kept places of each dim, int[n], or int[layers, n] where layers keep others."""
    found = []
    for place, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        numbers: Any = None
        # The experts of a router have no logical name, as no axis splits a router.
        is_routed = ".mlp.router." in name and place == len(dims) - 1
        if dim == "layers":
            numbers = kept.layers
        elif dim == "embed":
            numbers = kept.channels
        elif dim in ("heads", "kv_heads") and kept.groups:
            each = kept.heads_per_group if dim == "heads" else 1
            groups = np.asarray(kept.groups)[..., None] * each + np.arange(each)
            numbers = groups.reshape(len(kept.layers), -1)
        elif dim == "mlp":
            numbers = kept.hidden
        elif dim == "experts" or is_routed:
            numbers = kept.experts
        found.append(np.arange(size) if numbers is None else np.asarray(numbers))
    return found
