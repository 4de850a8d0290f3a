"""A decoder or encoder as a line of blocks: the one place that puts them together."""

from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.forward import Execution, run_stack
from zjax.models.block import Block, run_tile
from zjax.models.embedding import Embedding
from zjax.models.feed_forward import TiledFeedForward
from zjax.models.heads import Head
from zjax.models.nnx import nest, values_of
from zjax.parallel import remat
from zjax.typing import Auxiliary, Params, Segment, Stack, Tiles

SHARED = "embedding/tokens"
"""The token table, which the head of a tied model reads too."""


@runtime_checkable
class LineOfBlocks(Protocol):
    """A decoder or an encoder."""

    config: schema.Model
    embedding: Embedding
    blocks: Block
    head: Head


def make_stack(model: LineOfBlocks) -> Stack:
    """Presents a model as its embedding, its blocks and its head.

    Parameters are trees of dicts in the paths of the model: embed holds `embedding`,
    head holds `head` and, where it is tied, `embedding/tokens` again.

    Args:
        model: Decoder or encoder, whose pooling is left out; abstract values suffice.

    Returns:
        Functions of parameters, which recompute nothing of their own. `join` sums the
        two gradients of a tied table; to join parameters, zero the head's copy of the
        table first.
    """
    config = model.config
    embedding, _ = nnx.split(model.embedding)
    blocks, _ = nnx.split(model.blocks)
    last, _ = nnx.split(model.head)

    def embed(params, batch, key):
        return nnx.merge(embedding, params["embedding"])(batch, key)

    def block(params, carry, context, key):
        return nnx.merge(blocks, params)(carry, context, key), Auxiliary()

    def head(params, carry, batch):
        table = table_of(params, config)
        sums = nnx.merge(last, params["head"]).loss(carry, table, batch)
        return sums.loss_sum, sums.weight_sum, {"accuracy": sums.correct_sum}

    tiles = _tiles(model.blocks, config) if config.mlp_tiles > 1 else None
    return Stack(
        embed=embed,
        segments=(Segment(block, config.num_layers, tiles),),
        head=head,
        split=lambda params: _split(params, config),
        join=lambda embed, segments, head: _join(embed, segments, head, config),
        shared=(SHARED,) if config.tied_head else (),
    )


def execution_of(config: schema.Model) -> Execution:
    """How the blocks of a model run in one program.

    Args:
        config: Read for `layers_per_scan`, `remat` and `activation_memory`.

    Returns:
        The same for `zjax.forward`.
    """
    memory = remat.within_reach(config.activation_memory)
    return Execution(config.layers_per_scan, config.remat, memory)


def hidden_of(
    model: LineOfBlocks, batch: dict[str, Any], key: jax.Array | None
) -> Float[Array, "B L M"]:
    """The stream after the last block, which the head reads.

    Args:
        model: With its weights.
        batch: As its embedding takes it.
        key: For dropout; None is evaluation.

    Returns:
        One vector per token.
    """
    params = nest(values_of(nnx.state(model, nnx.Param)))
    stack, execution = make_stack(model), execution_of(model.config)
    return run_stack(stack, params, batch, key, execution)[0]


def table_of(params: Params, config: schema.Model) -> Float[Array, "V M"] | None:
    """The token table that the head reads.

    Args:
        params: Of the head.
        config: Says whether it is tied.

    Returns:
        None where the head has a matrix of its own.
    """
    return params["embedding"]["tokens"] if config.tied_head else None


def _tiled(blocks: Block) -> TiledFeedForward:
    assert isinstance(blocks.mlp, TiledFeedForward)
    return blocks.mlp


def without_tiles(blocks: Block) -> Block:
    """Blocks of tiled feed-forwards, less the tiles: what `Block.trunk` runs."""
    rest = nnx.clone(blocks)
    _tiled(rest).tiles = nnx.Dict({})
    return rest


def _tiles(blocks: Block, config: schema.Model) -> Tiles:
    one, _ = nnx.split(_tiled(blocks).tiles["0"])
    rest, _ = nnx.split(without_tiles(blocks))

    def split(params):
        mlp = dict(params["mlp"])
        tiles = mlp.pop("tiles")
        return params | {"mlp": mlp}, tuple(tiles[str(i)] for i in range(len(tiles)))

    def trunk(params, carry, context, key):
        carry, entering = nnx.merge(rest, params).trunk(carry, context, key)
        return (carry, entering), Auxiliary()

    def tile(params, entering, key):
        tile = nnx.merge(one, params)
        return run_tile(tile, entering, key, config=config)

    return Tiles(split=split, trunk=trunk, tile=tile)


def _split(params: Params, config: schema.Model):
    embed = {"embedding": params["embedding"]}
    head = {"head": params["head"]}
    if config.tied_head:
        head["embedding"] = {"tokens": params["embedding"]["tokens"]}
    return embed, (params["blocks"],), head


def _join(embed: Params, segments, head: Params, config: schema.Model):
    (blocks,) = segments
    joined: dict[str, Any] = {
        "embedding": dict(embed["embedding"]),
        "blocks": blocks,
        "head": head["head"],
    }
    if config.tied_head:
        joined["embedding"]["tokens"] += head["embedding"]["tokens"]
    return joined
