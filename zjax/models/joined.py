"""Blocks for few rows: matrices that read one stream stand side by side, as one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from zjax.models.block import Block, BlockGroup, layers_of, segments_of
from zjax.models.feed_forward import FeedForward
from zjax.models.layers import Attention, Linear, join, join_kernels
from zjax.models.stack import Decoder
from zjax.parallel import tensor
from zjax.typing import Params

_GROUPS = (
    ("attention", ("query", "key", "value"), Attention),
    ("mlp", ("gate", "up"), FeedForward),
)
"""Layers of a block that read one stream, and the module that has them."""


def streaming(model: Decoder, *, joins: bool) -> Decoder:
    """Returns an abstract decoder whose blocks meet few rows.

    With `joins`, matrices that read one stream are joined as far as they are plain:
    codes, adapters, float8 and splits over the tensor axis keep them apart. Norms,
    activations and residuals move into the products beside them.
    """
    graph, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    model = nnx.merge(graph, shapes)
    for blocks in segments_of(model.blocks).values():
        for layer in layers_of(blocks):
            for _, linear in nnx.iter_modules(layer):
                if isinstance(linear, Linear):
                    linear.streams = linear.matmul_dtype == "compute"
            if joins and tensor.num_shares() == 1:
                _join_groups(layer)
    return model


def _join_groups(layer: Block) -> None:
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
        join(linears)
        is_input = layer.norm_position in ("input", "both")
        norms[place].defers = is_input and norms[place].kind == "rms_norm"
        last = module.out if isinstance(module, Attention) else module.down
        is_last = layer.norm_position == "input" and not _has_bias(last)
        last.defers = is_last and _is_plain(last)


def _has_bias(*linears: Linear | None) -> bool:
    """Whether one of some layers adds a bias."""
    return any(linear is not None and linear.bias is not None for linear in linears)


def _is_plain(linear: Linear | None) -> bool:
    """Whether a layer is a product with a kernel in the dtype of the rows."""
    if linear is None or linear.lora is not None or linear.scales is not None:
        return False
    return linear.matmul_dtype == "compute"


def layer_joiner(blocks: Block | BlockGroup) -> Callable[[Params], Params]:
    """Returns the function from the parameters of a block to those of joined ones."""
    layers = layers_of(blocks)
    joined = [
        [(place, names) for place, names, _ in _GROUPS if _has_joined(layer, place)]
        for layer in layers
    ]
    if isinstance(blocks, Block):
        return functools.partial(_join_layer, joined[0])

    def lay(params: Params) -> Params:
        names = [f"layer{number}" for number in range(len(layers))]
        pairs = zip(names, joined, strict=True)
        return params | {name: _join_layer(each, params[name]) for name, each in pairs}

    return lay


def _has_joined(layer: Block, place: str) -> bool:
    """Whether a module of a layer has joined matrices."""
    modules = nnx.iter_modules(getattr(layer, place))
    linears = (x for _, x in modules if isinstance(x, Linear))
    return any(x.joined is not None for x in linears)


def _join_layer(groups: list[tuple[str, tuple[str, ...]]], params: Any) -> Any:
    """Puts the kernels of each group into the first layer of the group."""
    for place, names in groups:
        module = dict(params[place])
        kernels = [module[name]["kernel"] for name in names]
        for name in names:
            module[name] = {k: x for k, x in module[name].items() if k != "kernel"}
        module[names[0]] = module[names[0]] | {"joined": join_kernels(kernels)}
        params = params | {place: module}
    return params
