"""Collectives on the tokens of devices inside `jax.shard_map`, along the first dim.

Policies of `jax.checkpoint` can save the results by name, so that recomputation repeats
no collective (DeepSpeed-TED, arXiv:2303.06318, section 5).
"""

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

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
