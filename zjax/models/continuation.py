"""How a decoder continues text block by block, as its stack says."""

import functools

from flax import nnx

from zjax.models import cached, generate
from zjax.models.decoder import Decoder
from zjax.models.stack import table_of, without_tiles
from zjax.typing import CachedBlock, Continuation


def make_continuation(model: Decoder) -> Continuation:
    """Presents what `zjax.generate` does as functions of parts of the parameters.

    Args:
        model: Abstract values suffice.

    Returns:
        Functions of the parameters of the parts of `make_stack`.
    """
    config, is_tiled = model.config, model.config.mlp_tiles > 1
    embedding, _ = nnx.split(model.embedding)
    block, _ = nnx.split(without_tiles(model.blocks) if is_tiled else model.blocks)
    last, _ = nnx.split(model.head)

    def run(block, attend, x, context):
        if is_tiled:
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
        return cached.score(head, carry, table_of(params, config))

    return Continuation(
        check=functools.partial(generate.check, config),
        embed=embed,
        blocks=(CachedBlock(read_prompt, read_token),),
        score=score,
    )
