"""Chunks: the tokens that one pass of generation reads."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """C chunks of T consecutive tokens; each chunk belongs to one row of text.

    A chunk of one token continues a text, a longer one reads a part of a prompt.
    """

    tokens: Int[Array, "C T"]
    starts: Int[Array, " C"]
    """Position of the first token in the text."""
    counts: Int[Array, " C"]
    """Tokens that count, 0 to T; what follows is padding."""
    pages: Int[Array, "C P"]
    """Pages of the cache that hold the text, in order; 0 beyond the end."""
    num_given: Int[Array, " C"]
    """Tokens of the prompt of the text."""
    num_tokens: Int[Array, " C"]
    """Tokens of the text with all tokens to come."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of chunks, and tokens in each."""
        num_chunks, size = self.tokens.shape
        return num_chunks, size

    def cut(self, x: Shaped[Array, "N 1 ..."]) -> Shaped[Array, "C T ..."]:
        """Shapes tokens, which a pass holds as rows of one token, into the chunks."""
        return x.reshape(*self.shape, *x.shape[2:])

    def per_token(self, x: Int[Array, " C"]) -> Int[Array, " N"]:
        """Repeats a number of each chunk for all tokens of the chunk."""
        return jnp.repeat(x, self.shape[1])


def batch_of(parts: Sequence[Chunks]) -> dict[str, Any]:
    """Returns the batch that `Continuation.embed` reads, with each token as a row."""

    def positions(chunks: Chunks) -> Int[Array, "C T"]:
        places = jnp.arange(chunks.shape[1], dtype=jnp.int32)[None]
        # Padding repeats the last token's position: tables may end there.
        last = jnp.maximum(chunks.counts - 1, 0)
        return chunks.starts[:, None] + jnp.minimum(places, last[:, None])

    def mask(chunks: Chunks) -> Bool[Array, "C T"]:
        places = jnp.arange(chunks.shape[1], dtype=jnp.int32)[None]
        return places < chunks.counts[:, None]

    def join(values: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate([x.reshape(-1) for x in values])

    return {
        "tokens": join([x.tokens for x in parts])[:, None],
        "positions": join([positions(x) for x in parts])[:, None],
        "token_mask": join([mask(x) for x in parts])[:, None],
        "num_tokens": join([x.per_token(x.num_tokens) for x in parts]),
        "num_given": join([x.per_token(x.num_given) for x in parts]),
    }


def split_tokens(
    parts: Sequence[Chunks], x: Shaped[Array, "N 1 ..."]
) -> list[Shaped[Array, "C T ..."]]:
    """Splits the tokens of a pass into the chunks of each part."""
    ends, end = [], 0
    for chunks in parts:
        end += chunks.tokens.size
        ends.append(end)
    pieces = jnp.split(x, ends[:-1])
    return [chunks.cut(piece) for chunks, piece in zip(parts, pieces, strict=True)]
