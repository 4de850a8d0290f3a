"""Long sequences: attention by heads (Ulysses) or a ring, and layers chunk by chunk."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from zjax.errors import ConfigError
from zjax.ops import remat
from zjax.ops.attention import ATTENTION_OUTPUT
from zjax.ops.sparse import Window
from zjax.parallel import tensor
from zjax.parallel.ring import ring_attention, zigzag
from zjax.settings import schema
from zjax.settings.sequence import (
    length_problems,
    method_problems,
    sequence_method,
    window_problem,
)
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, pin, pin_tokens, row_axes


def ulysses_attention(
    attend: Callable[..., Float[Array, "B L H D"]],
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    *per_token: Shaped[Array, "B L"] | None,
) -> Float[Array, "B L H D"]:
    """Runs attention with heads split over tensor and sequence axis together.

    Heads of keys and values that are too few are repeated. `per_token` arrays are
    gathered, since every head reads them. Tensor and sequence axis together divide H.
    """
    if open_size(meshes.SEQUENCE) == 1:
        return attend(q, k, v, *per_token)
    rows = meshes.entry(row_axes(q.shape[0]))
    tensor = meshes.TENSOR if open_size(meshes.TENSOR) > 1 else None
    heads = (meshes.SEQUENCE,) if tensor is None else (tensor, meshes.SEQUENCE)
    repeats = num_repeats(k.shape[2])

    # Two pins in a row leave one change of sharding between them: an all-to-all.
    def to_heads(x: jax.Array) -> jax.Array:
        x = pin(x, rows, meshes.SEQUENCE, tensor)
        return pin(x, rows, None, meshes.entry(heads))

    def to_tokens(x: jax.Array) -> jax.Array:
        x = pin(x, rows, None, meshes.entry(heads))
        return pin(x, rows, meshes.SEQUENCE, tensor)

    def gathered(x: Any) -> Any:
        return None if x is None else pin(x, rows, None)

    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    averages = attend(*map(to_heads, (q, k, v)), *map(gathered, per_token))
    # Saved after the all-to-all, or recomputation would repeat the all-to-all.
    return checkpoint_name(to_tokens(averages), ATTENTION_OUTPUT)


def num_repeats(num_kv_heads: int) -> int:
    """Repeats of each head of keys and values, until devices divide the heads."""
    shares = open_size(meshes.TENSOR) * open_size(meshes.SEQUENCE)
    return shares // math.gcd(num_kv_heads, shares)


def sequence_attention(
    attend: Callable[..., Float[Array, "B L H D"]],
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    config: schema.Model,
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    window: Window | None = None,
) -> Float[Array, "B L H D"]:
    """Attends by `config.sequence_attention` over the mesh in use.

    Tokens are in the order of `arrange`. Calls `attend` on the inputs unchanged where
    the mesh does not split sequences; sparse attention takes `spread=True` for
    sequences that stay split. Heads or a length that do not divide are refused.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> sequence_attention(lambda q, *_: q, x, x, x, schema.Model()).shape
        (1, 4, 2, 8)
    """
    if not is_split():
        return attend(q, k, v, segment_ids, lengths, window)
    _check(config, q.shape[1])
    way = sequence_method(config, **_sizes())
    _log_way(way, f"{config.num_heads} heads")
    if window is not None and way != "ulysses":
        raise ConfigError(window_problem(way))
    if way == "halo":
        return attend(q, k, v, segment_ids, lengths, window, spread=True)
    if way == "ulysses":

        def attend_heads(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
            return attend(q, k, v, segment_ids, lengths, window)

        return ulysses_attention(attend_heads, q, k, v, segment_ids)
    return ring_attention(
        *(remat.mark(x, remat.PROJECTIONS) for x in (q, k, v)),
        causal=config.kind == "decoder",
        segment_ids=segment_ids,
        lengths=lengths,
        implementation="xla" if config.attention_kernel == "xla" else "auto",
    )


def num_kv_heads(config: schema.Model) -> int:
    """Number of key heads of attention over gathered sequences on the current mesh."""
    _, given = tensor.laid_heads(config.num_heads, config.num_kv_heads)
    uses_heads = is_split() and sequence_method(config, **_sizes()) == "ulysses"
    return given * num_repeats(given) if uses_heads else given


def is_split() -> bool:
    """Whether the mesh in use splits sequences outside of any `shard_map`."""
    return open_size(meshes.SEQUENCE) > 1


def token_order(length: int, config: schema.Model) -> Int[np.ndarray, " L"] | None:
    """Positions of tokens, device by device; None for the order 0, 1, ..."""
    if not is_split() or config.kind != "decoder":
        return None
    if sequence_method(config, **_sizes()) != "ring":
        return None
    _check(config, length)
    return zigzag(length, open_size(meshes.SEQUENCE))


def arrange(
    x: Shaped[Array, "B L *dims"], config: schema.Model
) -> Shaped[Array, "B L *dims"]:
    """Permutes tokens to `token_order`, and pins tokens to devices."""
    order = token_order(x.shape[1], config)
    return pin_tokens(x if order is None else _in_order(x, order))


def restore(
    x: Shaped[Array, "B L *dims"], config: schema.Model
) -> Shaped[Array, "B L *dims"]:
    """Undoes `arrange`."""
    order = token_order(x.shape[1], config)
    return x if order is None else _in_order(x, np.argsort(order))


def _in_order(x, order):
    """Permutes tokens, by slices."""
    # Slices of gathered sequences: XLA cannot split a gather inside `shard_map` over
    # other axes, and would send slices of split sequences one by one.
    gathered = meshes.entry(row_axes(x.shape[0])), None
    x = pin(x, *gathered)
    starts = np.flatnonzero(np.diff(order) != 1) + 1
    runs = (range(run[0], run[-1] + 1) for run in np.split(order, starts))
    pieces = [x[:, run.start : run.stop] for run in runs]
    return pin(jnp.concatenate(pieces, axis=1), *gathered)


def _sizes():
    """Sizes of sequence and tensor axis."""
    return {axis: open_size(axis) for axis in (meshes.SEQUENCE, meshes.TENSOR)}


def _check(config, length):
    """Refuses a method or a length that the mesh cannot split."""
    problems = [*method_problems(config, **_sizes())]
    problems = problems or [*length_problems("length", length, config, **_sizes())]
    if problems:
        raise ConfigError(*problems)


def _log_way(way, heads):
    """Logs the method and the axes that split."""
    sizes = " x ".join(f"{axis}={size}" for axis, size in _sizes().items() if size > 1)
    _log(way, f"{heads} over {sizes}")


@functools.cache
def _log(way, reason):
    """Logs a choice once."""
    logging.warning("sequence attention: %s (%s)", way, reason)


def by_chunks(
    run: Callable[[jax.Array], jax.Array],
    x: Float[Array, "B L M"],
    chunk_tokens: int,
) -> Float[Array, "B L M"]:
    """Applies a function of each token chunk by chunk, recomputed in the backward pass.

    Residuals of the function then exist for one chunk alone. Each chunk takes part of
    the tokens of every device, at most `chunk_tokens`; 0 takes all tokens.

    Reference:
        Arctic Long Sequence Training (arXiv:2506.13996, section 3.1).
    """
    num_rows, length, size = x.shape
    mesh = jax.sharding.get_abstract_mesh()
    rows = num_rows // meshes.num_shares(mesh, row_axes(num_rows))
    shards = meshes.num_shares(mesh, tensor.axes_of_length(x))
    columns = length // shards
    num_chunks = count_chunks(rows, columns, chunk_tokens)
    if num_chunks == 1:
        return run(x)
    width = math.ceil(columns / num_chunks)
    padding = num_chunks * width - columns
    # Chunks cut the local tokens of each device, or tokens would move between devices.
    x = x.reshape(num_rows, shards, columns, size)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])
    x = x.reshape(num_rows, shards, num_chunks, width, size)
    chunks = jnp.moveaxis(x, 2, 0).reshape(num_chunks, num_rows, -1, size)
    # Else the map would stack the residuals of all chunks.
    y: Any = jax.lax.map(jax.checkpoint(run), chunks)
    y = y.reshape(num_chunks, num_rows, shards, width, size)
    y = jnp.moveaxis(y, 0, 2).reshape(num_rows, shards, -1, size)
    return y[:, :, :columns].reshape(num_rows, length, size)


def count_chunks(rows: int, columns: int, chunk_tokens: int) -> int:
    """Number of chunks of the tokens of a device; `columns` are tokens per row.

    Example:
        >>> [count_chunks(2, 8, n) for n in (0, 16, 8, 1)]
        [1, 1, 2, 8]
    """
    return -(-columns // max(1, chunk_tokens // rows)) if chunk_tokens else 1
