"""Blocks of a model: segments of equal blocks, with stacked parameters.

A block has one layer, or several layers of which the last has experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.models.block import Block
from zjax.models.embedding import Context
from zjax.ops.keys import fold_in
from zjax.settings import mixture, schema
from zjax.stack.forward import combine
from zjax.typing import Auxiliary


class BlockGroup(nnx.Module):
    """Several layers that run as one block, such as a dense one and one with experts.

    Args:
        blocks: Layers in order, named `layer0`, `layer1`, ...
    """

    def __init__(self, blocks: Sequence[Block]):
        self.num_layers = len(blocks)
        for number, block in enumerate(blocks):
            setattr(self, f"layer{number}", block)

    def __call__(
        self, x: Float[Array, "B L M"], context: Context, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B L M"], Auxiliary]:
        """Transforms the stream; the key is None in evaluation."""
        auxiliaries = []
        for number, block in enumerate(layers_of(self)):
            x, auxiliary = block(x, context, fold_in(key, number))
            auxiliaries.append(auxiliary)
        totals = {n: x for each in auxiliaries for n, x in each.totals.items()}
        return x, combine(auxiliaries)._replace(totals=totals)


def layers_of(block: Block | BlockGroup) -> tuple[Block, ...]:
    """Returns the layers of a block."""
    if isinstance(block, Block):
        return (block,)
    return tuple(getattr(block, f"layer{i}") for i in range(block.num_layers))


class Segments(nnx.Module):
    """Several segments, named `segment0`, `segment1`, ...

    Args:
        segments: Stacked blocks of each segment.
    """

    def __init__(self, segments: "Sequence[Block | BlockGroup]"):
        self.num_segments = len(segments)
        for number, segment in enumerate(segments):
            setattr(self, f"segment{number}", segment)


def segments_of(blocks: "Block | BlockGroup | Segments") -> dict[str, Any]:
    """Returns stacked blocks of each segment by name; a single segment has name ""."""
    if not isinstance(blocks, Segments):
        return {"": blocks}
    names = [f"segment{number}" for number in range(blocks.num_segments)]
    return {name: getattr(blocks, name) for name in names}


def make_segments(
    make_block: Callable[[nnx.Rngs, int, bool], Block],
    config: schema.Model,
    *,
    rngs: nnx.Rngs,
    only_block: jax.Array | None = None,
) -> "Block | BlockGroup | Segments":
    """Makes the blocks of a model, stacked by segment."""

    def make_stacked(shape: mixture.SegmentShape) -> Block | BlockGroup:
        def make(rngs: nnx.Rngs) -> Block | BlockGroup:
            kinds = zip(shape.num_experts, shape.slides, strict=True)
            blocks = [make_block(rngs, *kind) for kind in kinds]
            # A group of one would add `layer0` to all paths of parameters.
            return blocks[0] if len(blocks) == 1 else BlockGroup(blocks)

        return make_blocks(make, shape.num_blocks, rngs=rngs, only_block=only_block)

    segments = [make_stacked(shape) for shape in mixture.segment_shapes(config)]
    return segments[0] if len(segments) == 1 else Segments(segments)


def make_blocks(
    make_block: Callable[[nnx.Rngs], Any],
    num_blocks: int,
    *,
    rngs: nnx.Rngs,
    only_block: jax.Array | None = None,
) -> Any:
    """Makes a block with stacked parameters, with `layers` as first dim.

    `only_block`, int32[], is the index of a block in its segment: every segment makes
    this block alone, as offload needs blocks one by one. None makes all blocks.
    """

    def init(key: jax.Array):
        return nnx.state(make_block(nnx.Rngs(params=key)))

    def name_layers(variable):
        return variable.replace(logical=("layers", *variable.get_metadata("logical")))

    numbers = jnp.arange(num_blocks) if only_block is None else only_block[None]
    # By number, so that a block made alone has equal values.
    keys = _fold_in(rngs.params(), numbers)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(params=keys[0]))))
    state = jax.tree.map(
        name_layers, jax.vmap(init)(keys), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return nnx.merge(graph, state)


def _fold_in(key, numbers):
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
