"""Generation steps block by block, for decoders with offloaded blocks."""

import functools

from flax import nnx

from zjax.models import cached, generate
from zjax.models.block import Block
from zjax.models.segments import segments_of
from zjax.models.stack import Decoder, head_table, without_tiles
from zjax.typing import CachedBlock, Continuation


def make_continuation(model: Decoder) -> Continuation:
    """Makes the steps of generation from a decoder with concrete or abstract values."""
    config, is_tiled = model.config, model.config.mlp_tiles > 1
    embedding_graph, _ = nnx.split(model.embedding)
    head_graph, _ = nnx.split(model.head)

    def embed(params, *args):
        return cached.embed(nnx.merge(embedding_graph, params["embedding"]), *args)

    def cached_block(blocks):
        # Tiles of offloaded blocks are loaded and run one by one by the caller.
        graph, _ = nnx.split(without_tiles(blocks) if is_tiled else blocks)

        def read(how, params, *args):
            if is_tiled:
                return how(nnx.merge(graph, params), *args, run=Block.trunk_with)
            x, cache = how(nnx.merge(graph, params), *args)
            return (x, ()), cache

        return CachedBlock(
            functools.partial(read, cached.read_prompt),
            functools.partial(read, cached.read_token),
        )

    def score(params, carry):
        head = nnx.merge(head_graph, params["head"])
        return cached.score(head, carry, head_table(params, config))

    return Continuation(
        check=functools.partial(generate.check, config),
        embed=embed,
        blocks=tuple(map(cached_block, segments_of(model.blocks).values())),
        score=score,
    )
