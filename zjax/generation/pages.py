"""Pages: the keys and values of a layer, in blocks that any row of text may hold."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.generation.chunks import Chunks, split_tokens
from zjax.generation.dtypes import CacheDtype
from zjax.generation.shards import num_shards, shard_axes
from zjax.models.continuation import How
from zjax.models.layers import Stored
from zjax.models.projections import Projections, finish
from zjax.ops import attention, sparse
from zjax.ops.invariant_attention import attend_to_pages, scores_of
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import head_axes, pin
from zjax_kernels import paged_attention, write_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages of one layer, shared by all rows of text.

    No other code knows the layout, the dtype or the sharding of a cache:
    [pages, heads, page, channels] each; pages are split over data shards, and heads
    over the tensor and sequence axes of the mesh in use.

    Args:
        stored: Keys and values; one array of latents serves as both.
    """

    stored: tuple[Any, ...]

    @classmethod
    def empty(
        cls,
        like: tuple[Any, ...],
        num_pages: int,
        page_size: int,
        cache_dtype: CacheDtype = "compute",
    ) -> "Pages":
        """Makes pages of zeros for shapes that a layer stores, [N, 1, heads, C].

        Each data shard has `num_pages`.
        """
        num_pages *= num_shards(shard_axes())

        def zeros(x: Any) -> jax.Array:
            dtype = x.dtype if cache_dtype == "compute" else jnp.float8_e4m3fn
            shape = num_pages, x.shape[2], page_size, x.shape[3]
            return _pinned(jnp.zeros(shape, dtype))

        return cls(tuple(map(zeros, like)))

    def write(self, new: Stored, parts: Sequence[Chunks]) -> "Pages":
        """Returns the pages with the tokens of a pass."""
        pools = []
        for pool, x in zip(self.stored, new, strict=True):
            for chunks, piece in zip(parts, split_tokens(parts, x), strict=True):
                where = chunks.pages, chunks.starts, chunks.counts
                pool = write_pages(pool, piece, *where)
            pools.append(_pinned(pool))
        return Pages(tuple(pools))

    def write_projections(
        self, projections: Projections, chunks: Chunks
    ) -> tuple[Float[Array, "N 1 H D"], "Pages"]:
        """Returns the queries of chunks of one token, and the pages with the tokens."""
        where = chunks.pages, chunks.starts, chunks.counts
        q, (keys, values) = projections.write(self.read(), *where)
        return q, Pages((_pinned(keys), _pinned(values)))

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values, [pages, heads, page, channels]."""
        return self.stored[0], self.stored[-1]


def _pinned(pool: Float[Array, "pages heads page C"]) -> Float[Array, "..."]:
    """Splits pages and heads over the mesh in use.

    The compiler may replicate heads in a loop. Inside a shard only heads are split.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return pool
    axes = shard_axes(), head_axes(pool.shape[1])
    return pin(pool, *map(meshes.entry, axes), None, None)


def bytes_on_device(pool: Any) -> int:
    """Counts the bytes that an array of pages takes on a device of the mesh in use."""
    shares = num_shards((*shard_axes(), *head_axes(pool.shape[1])))
    return math.prod(pool.shape) * pool.dtype.itemsize // shares


def attend(
    parts: Sequence[Chunks], cache: Pages, how: How, q: Any, k: Any, v: Any, new: Stored
) -> tuple[Float[Array, "N 1 H Dv"], Pages]:
    """Stores the tokens of a pass, and attends from them; see `Continuation`."""
    is_decoding = len(parts) == 1 and parts[0].shape[1] == 1 and how.sparse is None
    if isinstance(q, Projections) and is_decoding:
        q, cache = cache.write_projections(q, parts[0])
        return _attend_to_pages(parts[0], cache, how, q), cache
    q, _, _, new = finish(q, k, v, new)
    cache = cache.write(new, parts)
    read = _attend_to_blocks if how.sparse is not None else _attend_to_pages
    pairs = zip(parts, split_tokens(parts, q), strict=True)
    outputs = [read(chunks, cache, how, piece) for chunks, piece in pairs]
    flat = [x.reshape(-1, 1, *x.shape[2:]) for x in outputs]
    return jnp.concatenate(flat), cache


def _attend_to_pages(
    chunks: Chunks, cache: Pages, how: How, q: Float[Array, "C T H D"]
) -> Float[Array, "C T H Dv"]:
    """Attends to all earlier tokens, or to the last tokens in a window."""
    if how.invariant:
        where = chunks.pages, chunks.starts, chunks.counts
        scores = scores_of(how.bounds, q.shape[-1])
        return attend_to_pages(q, *cache.read(), *where, scores, how.sinks)
    return paged_attention(
        q,
        *cache.read(),
        chunks.pages,
        chunks.starts,
        chunks.counts,
        window=how.bounds.window,
        soft_cap=how.bounds.soft_cap,
        sinks=how.sinks,
        value_size=how.value_size,
        early=True,
    )


def _attend_to_blocks(
    chunks: Chunks, cache: Pages, how: How, q: Float[Array, "C T H D"]
) -> Float[Array, "C T H D"]:
    """Attends to the live blocks of a sparse layout, with all pages of a row at once.

    Blocks of a layout are no whole pages, and heads differ in them.
    """
    assert how.sparse is not None

    def gather(pool: jax.Array) -> jax.Array:
        rows = jnp.swapaxes(pool[chunks.pages], 2, 3)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])

    keys, values = (gather(pool).astype(q.dtype) for pool in cache.read())
    positions = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
    places = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    queries = chunks.starts[:, None] + places
    positions = jnp.broadcast_to(positions, keys.shape[:2])
    mask = sparse.visible_keys(how.sparse, queries, positions)
    mask &= (positions[:, None] <= queries[..., None])[:, None]
    return attention.call_jax(q, keys, values, mask=mask, implementation="xla")
