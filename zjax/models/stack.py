"""A decoder or encoder as a line of blocks.

`Decoder.loss(batch, key)` gives the embedding the key `fold_in(key, 0)` and block i the
key `fold_in(key, i + 1)`; a caller who does the same gets the same dropout.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from zjax.config import schema
from zjax.models import cached, generate
from zjax.models.block import Block, run_tile
from zjax.models.decoder import Decoder
from zjax.models.encoder import Encoder
from zjax.models.feed_forward import TiledFeedForward
from zjax.sharding.layers import layers_of, side_by_side
from zjax.typing import Continuation, Params, Segment, Stack, Tiles

SHARED = "embedding/tokens"
"""The token table, which the head of a tied model reads too."""


def make_stack(model: Decoder | Encoder) -> Stack:
    """Presents a model as its embedding, its blocks and its head.

    Parameters are trees of dicts in the paths of the model: embed holds `embedding`,
    head holds `head` and, where it is tied, `embedding/tokens` again.

    Args:
        model: Decoder or encoder without pooling; abstract values suffice.

    Returns:
        Functions of parameters, which recompute nothing of their own. `join` sums the
        two gradients of a tied table; to join parameters, zero the head's copy of the
        table first. It leaves layers apart.
    """
    config = model.config
    embedding, _ = nnx.split(model.embedding)
    blocks, _ = nnx.split(model.blocks)
    last, _ = nnx.split(model.head)

    def embed(params, batch, key):
        return nnx.merge(embedding, params["embedding"])(batch, key)

    def block(params, carry, context, key):
        carry = nnx.merge(blocks, params)(carry, context, key)
        return carry, jnp.zeros((), jnp.float32)

    def head(params, carry, batch):
        table = _table(params, config)
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
        continuation=(
            _continuation(config, embedding, model.blocks, last)
            if isinstance(model, Decoder)
            else None
        ),
    )


def _continuation(config: schema.Model, embedding, blocks: Block, last) -> Continuation:
    block, _ = nnx.split(_without_tiles(blocks) if config.mlp_tiles > 1 else blocks)

    def run(block, attend, x, context):
        if config.mlp_tiles > 1:
            return block.trunk_with(attend, x, context)
        x, kept = block.attend_with(attend, x, context)
        return (x, ()), kept

    def embed(params, *args):
        return cached.embed(nnx.merge(embedding, params["embedding"]), *args)

    def read_prompt(params, *args):
        return cached.read_prompt(nnx.merge(block, params), *args, run=run)

    def read_token(params, *args):
        return cached.read_token(nnx.merge(block, params), *args, run=run)

    def score(params, carry):
        head = nnx.merge(last, params["head"])
        return cached.score(head, carry, _table(params, config))

    return Continuation(
        check=functools.partial(generate.check, config),
        embed=embed,
        read_prompt=read_prompt,
        read_token=read_token,
        score=score,
    )


def _table(params: Params, config: schema.Model):
    return params["embedding"]["tokens"] if config.tied_head else None


def _tiled(blocks: Block) -> TiledFeedForward:
    assert isinstance(blocks.mlp, TiledFeedForward)
    return blocks.mlp


def _without_tiles(blocks: Block) -> Block:
    rest = nnx.clone(blocks)
    _tiled(rest).tiles = nnx.Dict({})
    return rest


def _tiles(blocks: Block, config: schema.Model) -> Tiles:
    one, _ = nnx.split(_tiled(blocks).tiles["0"])
    rest, _ = nnx.split(_without_tiles(blocks))

    def split(params):
        mlp = dict(params["mlp"])
        tiles = mlp.pop("tiles")
        return params | {"mlp": mlp}, tuple(tiles[str(i)] for i in range(len(tiles)))

    def trunk(params, carry, context, key):
        carry, entering = nnx.merge(rest, params).trunk(carry, context, key)
        return (carry, entering), jnp.zeros((), jnp.float32)

    def tile(params, entering, key):
        tile = nnx.merge(one, params)
        return run_tile(tile, entering, key, config=config)

    return Tiles(split=split, trunk=trunk, tile=tile)


def _split(params: Params, config: schema.Model):
    embed = {"embedding": params["embedding"]}
    head = {"head": params["head"]}
    if config.tied_head:
        head["embedding"] = {"tokens": params["embedding"]["tokens"]}
    layers = layers_of(params["blocks"], config.num_layers)
    return embed, (tuple(layers),), head


def _join(embed: Params, segments, head: Params, config: schema.Model):
    (layers,) = segments
    joined: dict[str, Any] = {
        "embedding": dict(embed["embedding"]),
        "blocks": side_by_side(layers),
        "head": head["head"],
    }
    if config.tied_head:
        joined["embedding"]["tokens"] += head["embedding"]["tokens"]
    return joined
