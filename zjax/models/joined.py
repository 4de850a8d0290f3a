"""Blocks for few rows: matrices that read one stream stand side by side, as one.

Matrices may become codes on the way. Latent attention absorbs the matrix behind the
latents.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zjax.errors import Problem
from zjax.models.block import Block, BlockGroup, layers_of, segments_of
from zjax.models.feed_forward import FeedForward
from zjax.models.latent import LatentAttention
from zjax.models.layers import (
    Attention,
    Linear,
    are_joined,
    join,
    join_biases,
    join_kernels,
)
from zjax.models.mixture import MixtureOfExperts
from zjax.models.rounded import rounded_layers
from zjax.models.stack import Decoder
from zjax.ops.narrow import GROUP, WeightDtype
from zjax.ops.rounding import group_size
from zjax.parallel import tensor
from zjax.typing import Params
from zjax_kernels import lay_router

_GROUPS = (
    ("attention", ("query", "key", "value"), Attention),
    ("mlp", ("gate", "up"), FeedForward),
)
"""Layers of a block that read one stream, and the module that has them."""


def streaming(
    model: Decoder, *, joins: bool, weight_dtype: WeightDtype = "compute"
) -> Decoder:
    """Returns an abstract decoder whose blocks meet few rows.

    With `joins`, matrices that read one stream are joined as far as they are plain:
    codes, adapters, float8 and splits over the tensor axis keep them apart. Norms,
    activations and residuals move into the products beside them. With a narrow
    `weight_dtype`, all matrices of blocks are codes, except for absorbed matrices.
    Kernels for few rows read the experts that are chosen, and norm and residual of
    experts. Blocks of a batch-invariant decoder stay as they are in training.
    """
    graph, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    model = nnx.merge(graph, shapes)
    if model.invariant:
        return model
    for blocks in segments_of(model.blocks).values():
        for layer in layers_of(blocks):
            if isinstance(layer.attention, LatentAttention):
                layer.attention.absorb()
            linears = [linear for _, linear in _linears_of(layer)]
            for module in rounded_layers(layer).values():
                # `layer_joiner` rounds kernels once, or makes codes of them.
                is_plain = module.rounding.activations == "compute"
                rule = dataclasses.replace(module.rounding, weights="compute")
                module.rounding = None if is_plain else rule
            for linear in linears:
                if weight_dtype != "compute":
                    linear.matmul_dtype = "compute"  # of training
                linear.streams = linear.matmul_dtype == "compute"
            if joins and tensor.num_shares() == 1:
                _join_groups(layer, weight_dtype)
            if joins and isinstance(layer.mlp, MixtureOfExperts):
                _stream_experts(layer, layer.mlp)
            if weight_dtype != "compute":
                for linear in linears:
                    if linear.kernel is not None:
                        join([linear], weight_dtype)
    return model


def _linears_of(layer: Block) -> Iterator[tuple[tuple[str, ...], Linear]]:
    """Yields path and layer of each matrix of a block."""
    # A list: the caller changes the layers while it iterates.
    for path, module in [*nnx.iter_modules(layer)]:
        if isinstance(module, Linear):
            yield tuple(map(str, path)), module


def _rounded_at(path: Sequence[str], module: Any, params: Any) -> Any:
    """Rounds the kernel of a layer in the parameters of a module `path` away."""
    if not path:
        return params | {"kernel": module.rounded(params["kernel"])}
    inner = _rounded_at(path[1:], module, params[path[0]])
    return params | {path[0]: inner}


def _stream_experts(layer: Block, experts: MixtureOfExperts) -> None:
    """Lets kernels for few rows read the experts of a layer, and norm and stream."""
    fuses = tensor.num_shares() == 1
    experts.stream(fuses=fuses and layer.norm_position == "input")
    is_input = layer.norm_position in ("input", "both")
    has_norm = is_input and layer.mlp_norm.kind == "rms_norm"
    layer.mlp_norm.defers = fuses and has_norm and experts.takes_norm


def _join_groups(layer: Block, weight_dtype: WeightDtype) -> None:
    """Joins the groups of a layer, with what comes before and behind."""
    norms = {"attention": layer.attention_norm, "mlp": layer.mlp_norm}
    for place, names, kind in _GROUPS:
        module = getattr(layer, place)
        if not isinstance(module, kind):
            continue
        linears = [getattr(module, name) for name in names]
        # The activation is applied to the product, without biases between.
        has_room = place == "attention" or not _has_bias(*linears)
        if not (has_room and all(map(_is_plain, linears))):
            continue
        join(linears, weight_dtype)
        join_biases(linears)
        is_input = layer.norm_position in ("input", "both")
        norms[place].defers = is_input and norms[place].kind == "rms_norm"
        if isinstance(module, Attention):
            module.defers = _rotates_halves(module)
        last = module.out if isinstance(module, Attention) else module.down
        is_last = layer.norm_position == "input" and not _has_bias(last)
        last.defers = is_last and _is_plain(last)


def _rotates_halves(attention: Attention) -> bool:
    """Whether each head is normalised alone, if at all, and rotates by halves."""
    norm, is_alone = attention.query_norm, attention.normalizes_heads
    is_plain = norm is None or (norm.kind == "rms_norm" and is_alone)
    return is_plain and attention.rotary_pairs == "halves"


def _has_bias(*linears: Linear | None) -> bool:
    """Whether one of some layers adds a bias."""
    return any(linear is not None and linear.bias is not None for linear in linears)


def _is_plain(linear: Linear | None) -> bool:
    """Whether a layer is a product with a kernel in the dtype of the rows."""
    if linear is None or linear.lora is not None or linear.scales is not None:
        return False
    if linear.rounding is not None:
        return False  # rounds what enters
    return linear.matmul_dtype == "compute"


class Group(NamedTuple):
    """Layers whose kernels the first of them holds, side by side."""

    place: tuple[str, ...]
    """Path of the module that has the layers."""
    names: tuple[str, ...]
    num_inputs: int


def layer_joiner(
    blocks: Block | BlockGroup,
    streamed: Block | BlockGroup,
    weight_dtype: WeightDtype = "compute",
) -> Callable[[Params], Params]:
    """Returns the function from parameters of a block to parameters as streamed."""
    pairs = zip(layers_of(blocks), layers_of(streamed), strict=True)
    lays = [_layer_joiner(*layers, weight_dtype) for layers in pairs]
    if isinstance(blocks, Block):
        return lays[0]

    def lay(params: Params) -> Params:
        names = [f"layer{number}" for number in range(len(lays))]
        pairs = zip(names, lays, strict=True)
        return params | {name: each(params[name]) for name, each in pairs}

    return lay


def _layer_joiner(
    layer: Block, streamed: Block, weight_dtype: WeightDtype
) -> Callable[[Params], Params]:
    """Returns the function from parameters of a layer to parameters as streamed."""
    groups, mlp, attention = [*_groups_of(streamed)], streamed.mlp, layer.attention
    rounded = rounded_layers(layer) if weight_dtype == "compute" else {}
    has_laid = isinstance(mlp, MixtureOfExperts) and mlp.router.laid is not None
    absorb = None
    # A batch-invariant layer makes these matrices as in training.
    if isinstance(attention, LatentAttention) and not layer.invariant:
        absorb = attention.absorber()
        # Rounded when the matrix is absorbed.
        rounded.pop("attention/key_value", None)

    def lay(params: Params) -> Params:
        for path, module in rounded.items():
            params = _rounded_at(path.split("/"), module, params)
        params = _join_layer(groups, weight_dtype, params)
        if absorb is not None:
            params = params | {"attention": absorb(params["attention"])}
        return params | {"mlp": _lay_router(params["mlp"])} if has_laid else params

    return lay


def _lay_router(params: Any) -> Any:
    """Lays the matrix of a router for tokens in the dtype of the experts."""
    router, dtype = dict(params["router"]), params["experts"]["up"]["kernel"].dtype
    router["laid"] = lay_router(router.pop("kernel"), dtype)
    return params | {"router": router}


def _groups_of(layer: Block) -> Iterator[Group]:
    """Yields the groups of a layer, of which some have one matrix."""
    linears = dict(_linears_of(layer))
    members: dict[tuple[str, ...], tuple[str, ...]] = {
        (place, names[0]): names for place, names, _ in _GROUPS
    }
    for path, linear in linears.items():
        *place, name = path
        names = members.get(path, (name,))
        found = [linears[*place, each] for each in names if (*place, each) in linears]
        if len(found) < len(names) or not are_joined(found):
            names = (name,)
        if linear.joined is not None:
            yield Group(tuple(place), names, linear.num_inputs)


def _join_layer(groups: list[Group], weight_dtype: WeightDtype, params: Any) -> Any:
    """Puts the matrices of each group into the first layer of the group."""
    for group in groups:
        params = _join_group(group, weight_dtype, params, group.place)
    return params


def _join_group(
    group: Group, weight_dtype: WeightDtype, params: Any, place: tuple[str, ...]
) -> Any:
    """Joins a group in the parameters of a module, `place` away from the group's."""
    if place:
        inner = _join_group(group, weight_dtype, params[place[0]], place[1:])
        return params | {place[0]: inner}
    layers = {name: dict(params[name]) for name in group.names}
    kernels = [layer.pop("kernel") for layer in layers.values()]
    first = layers[group.names[0]]
    first |= join_kernels(kernels, group.num_inputs, weight_dtype)
    if len(layers) > 1 and "bias" in first:
        biases = [layer.pop("bias").reshape(-1) for layer in layers.values()]
        first["joined_bias"] = jnp.concatenate(biases)
    return params | layers


def code_problems(model: Decoder, weight_dtype: WeightDtype) -> Iterator[Problem]:
    """Yields what of a decoder cannot be stored as codes."""
    merge = "merge them by zjax export, or use 'compute'"
    trained = _other_codes(model, weight_dtype)
    reasons = (
        (bool(model.config.moe), "experts", "use 'compute'"),
        (model.config.mlp_tiles > 1, "tiles of feed-forwards", "use 'compute'"),
        (_has_adapters(model), "matrices with adapters", merge),
        (bool(trained), f"matrices that learned {trained}", "use 'compute'"),
        (
            tensor.num_shares() > 1,
            "matrices that the tensor axis splits",
            "set mesh.tensor=1, or use 'compute'",
        ),
    )
    for holds, what, remedy in reasons:
        if holds:
            problem = f"stores no codes of {what}"
            yield Problem("weight_dtype", weight_dtype, problem, remedy)


def _other_codes(model: Decoder, weight_dtype: WeightDtype) -> str:
    """Describes codes other than `weight_dtype` with which a decoder was trained."""
    most = {"int4": GROUP}.get(weight_dtype, 0)
    for _, layer in nnx.iter_modules(model):
        if not isinstance(layer, Linear) or layer.rounding is None:
            continue
        rule = layer.rounding
        depth = math.prod(layer.kernel.shape[-layer.num_inputs - layer.num_outputs :])
        depth //= math.prod(layer.output_sizes)
        trained, stored = (group_size(depth, n) for n in (rule.group_size, most))
        if (rule.weights, trained) != (weight_dtype, stored):
            return f"{rule.weights} in groups of {trained}, not {stored}"
    return ""


def _has_adapters(model: Decoder) -> bool:
    """Whether a matrix of a decoder has an adapter."""
    linears = (x for _, x in nnx.iter_modules(model) if isinstance(x, Linear))
    return any(linear.lora is not None for linear in linears)
