"""Tokens of a device: collectives inside `jax.shard_map`, and random subsets."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int, Shaped

from zjax.ops.keys import fold_name
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import first_row, open_size

EXCHANGED = "exchanged_tokens"
"""Name of the results of the collectives, and scope in compiled programs."""
ROUTED = "routed_tokens"
"""Name of the experts of all tokens, and of the order of tokens by expert."""


@jax.named_scope(EXCHANGED)
def gather(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """All-gathers over one axis after another."""
    for axis in axes:
        x = checkpoint_name(jax.lax.all_gather(x, axis, tiled=True), EXCHANGED)
    return x


@jax.named_scope(EXCHANGED)
def reduce_scatter(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums and scatters over the last axis first, the transpose of `gather`."""
    for axis in reversed(axes):
        total = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
        x = checkpoint_name(total, EXCHANGED)
    return x


@jax.named_scope(EXCHANGED)
def all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sends an equal part to each device, in order; a second call undoes the first."""
    exchanged = jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
    return checkpoint_name(exchanged, EXCHANGED)


def draw_subset(
    key: jax.Array, *, num_rows: int, length: int, num_kept: int
) -> Int[Array, "B K"]:
    """Draws sorted token indices for each row, uniformly and without replacement.

    Each row draws by index in the microbatch, on any mesh. Over a sequence axis each
    device keeps equally many local tokens, so that no token moves, and equally many in
    both halves if the halves divide: a ring holds two chunks on each device. `num_rows`
    are the rows of the device inside `shard_map`, all rows outside.

    Reference:
        Yao et al., Random-LTD (arXiv:2211.11586), section 3.1.
    """
    key = fold_name(key, "token_subset")
    parts = _num_parts(length, num_kept)
    tokens = jnp.arange(length, dtype=jnp.int32).reshape(parts, -1)

    def draw(row: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(key, row), (length,))
        # Sorting by random bits shuffles each part, without replacement.
        _, shuffled = jax.lax.sort((bits.reshape(parts, -1), tokens), num_keys=1)
        # Ascending, as causal attention and `_HINTS` need.
        return jnp.sort(shuffled[:, : num_kept // parts]).reshape(-1)

    return jax.vmap(draw)(first_row(num_rows) + jnp.arange(num_rows))


def on_subset(
    run: Callable[[Any], tuple[Any, Any]], x: Any, indices: Int[Array, "B K"]
) -> tuple[Any, Any]:
    """Runs a function on some tokens; all further tokens pass by unchanged.

    `run` returns tokens of the shapes given, and anything else. The backward pass reads
    and writes the rows of the subset alone, as the forward pass does: the cotangent of
    further tokens is neither copied nor added up.
    """
    split = jax.tree.map(lambda x: _split(x, indices), x)
    others, subset = jax.tree.transpose(jax.tree.structure(x), None, split)
    subset, rest = run(subset)
    joined = jax.tree.map(lambda x, new: _join(x, new, indices), others, subset)
    return joined, rest


def take_tokens(
    x: Shaped[Array, "B L *dims"], indices: Int[Array, "B K"]
) -> Shaped[Array, "B K *dims"]:
    """Gathers the tokens of a subset from `draw_subset`."""
    return _by_part(lambda index, row: row.at[index].get(**_HINTS), indices, x)


def _num_parts(length, num_kept):
    """Number of equal parts of a row that keep equally many tokens."""
    devices = open_size(meshes.SEQUENCE)
    halves = 2 * devices
    is_halved = devices > 1 and length % halves == num_kept % halves == 0
    return halves if is_halved else devices


def _replace_tokens(x, new, indices):
    """Writes the tokens of a subset into all tokens."""

    def one(index, row, new):
        return row.at[index].set(new, **_HINTS)

    return _by_part(one, indices, x, new)


def _by_part(function, indices, x, *others):
    """Maps over rows, and over the parts of a row that the sequence axis stores."""
    parts = _num_parts(x.shape[1], indices.shape[1])
    if parts == 1:
        return jax.vmap(function)(indices, x, *others)

    def split(x):
        return x.reshape(len(x), parts, -1, *x.shape[2:])

    # Indices in a part: global indices would gather the row over the sequence axis.
    starts = jnp.arange(parts).reshape(1, -1, 1) * (x.shape[1] // parts)
    arrays = split(indices) - starts, *map(split, (x, *others))
    found = jax.vmap(jax.vmap(function))(*arrays)
    return found.reshape(len(x), -1, *found.shape[3:])


# True of indices of `draw_subset`; XLA then neither clamps nor sorts indices.
_HINTS = {
    "mode": "promise_in_bounds",
    "indices_are_sorted": True,
    "unique_indices": True,
    "wrap_negative_indices": False,
}


@jax.custom_vjp
def _split(x, indices):
    """Returns all tokens, of which `_join` replaces the subset, and the subset."""
    return x, take_tokens(x, indices)


@jax.custom_vjp
def _join(others, subset, indices):
    """Replaces the subset in all tokens."""
    return _replace_tokens(others, subset, indices)


# The cotangent of `others` is wrong in the subset, where it has to be 0. `_split`
# replaces it there by the cotangent of the subset.
_join.defvjp(
    lambda others, subset, indices: (_join(others, subset, indices), indices),
    lambda indices, grads: (grads, take_tokens(grads, indices), None),
)
_split.defvjp(
    lambda x, indices: (_split(x, indices), indices),
    lambda indices, grads: (_replace_tokens(grads[0], grads[1], indices), None),
)
