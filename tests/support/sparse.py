"""Small models with sparse attention, and the mask of tokens that they mean."""

import dataclasses

import numpy as np

from tests.support import language
from zjax.ops import sparse
from zjax.settings import schema

BLOCK, LENGTH = 16, 96
SPARSE = schema.Sparse(block=BLOCK, pattern=schema.Bigbird())
GPT = dataclasses.replace(
    language.GPT, num_heads=2, num_kv_heads=2, attention=SPARSE, max_length=LENGTH
)
LLAMA = dataclasses.replace(
    GPT,
    num_kv_heads=1,
    norm="rms_norm",
    positions=schema.Rotary(),
    activation="swiglu",
    use_bias=False,
)
BERT = dataclasses.replace(GPT, kind="encoder")


def mask_of(config, length=LENGTH):
    """bool[heads, length, length], from the blocks of the longest sequence."""
    pattern = sparse.sparse_of(config).pattern
    blocks = pattern.layout(-(-config.max_length // BLOCK) * BLOCK).to_dense()
    live = blocks.repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :length, :length]
    return live & np.tri(length, dtype=bool) if config.kind == "decoder" else live
