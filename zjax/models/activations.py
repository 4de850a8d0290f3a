"""Forward passes of a decoder's blocks that return what the matrices read."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from zjax.models.block import Activations, Block
from zjax.models.stack import Decoder
from zjax.typing import Model, Params


def measured_block(
    model: Model,
) -> Callable[[Params, Any, Any], tuple[jax.Array, Activations]]:
    """Returns `block(params, stream, context)` of a decoder with equal layers.

    Args:
        model: Built-in decoder of one segment, whose blocks are one layer each.
    """
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    decoder = model.bind(shapes, {})
    assert isinstance(decoder, Decoder) and isinstance(decoder.blocks, Block)
    graph, _ = nnx.split(decoder.blocks)

    def block(
        params: Params, stream: Any, context: Any
    ) -> tuple[jax.Array, Activations]:
        return nnx.merge(graph, params).activations(stream, context)

    return block
