"""Text generation block by block, for decoders whose blocks are offloaded."""

import functools

from flax import nnx

from zjax.models import cached, generate
from zjax.models.decoder import Decoder
from zjax.models.stack import head_table, without_tiles
from zjax.typing import CachedBlock, Continuation


def make_continuation(model: Decoder) -> Continuation:
    """Makes the steps of generation as functions of the parameters of a stack's parts.

    Args:
        model: The decoder; abstract values suffice.
    """
    config, is_tiled = model.config, model.config.mlp_tiles > 1
    embedding_graph, _ = nnx.split(model.embedding)
    block_graph, _ = nnx.split(
        without_tiles(model.blocks) if is_tiled else model.blocks
    )
    head_graph, _ = nnx.split(model.head)

    def run(block, attend, x, context):
        if is_tiled:
            return block.trunk_with(attend, x, context)
        x, cache = block.attend_with(attend, x, context)
        return (x, ()), cache

    def embed(params, *args):
        return cached.embed(nnx.merge(embedding_graph, params["embedding"]), *args)

    def read_prompt(params, *args):
        return cached.read_prompt(nnx.merge(block_graph, params), *args, run=run)

    def read_token(params, *args):
        return cached.read_token(nnx.merge(block_graph, params), *args, run=run)

    def score(params, carry):
        head = nnx.merge(head_graph, params["head"])
        return cached.score(head, carry, head_table(params, config))

    return Continuation(
        check=functools.partial(generate.check, config),
        embed=embed,
        blocks=(CachedBlock(read_prompt, read_token),),
        score=score,
    )
