"""Queries, keys and values whose rotation is left to the store of keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax_kernels import rotate_and_write

Heads = tuple[Float[Array, "N L H D"], Float[Array, "N L KV D"], Any]
"""Queries, keys and values."""


@dataclasses.dataclass(frozen=True)
class Projections:
    """Queries, keys and values of tokens side by side, before norms and the rotation.

    One kernel does the rest where decoded tokens are stored in pages.

    Args:
        product: [N, 1, (H + 2 KV) D] product of tokens and joined kernels.
        bias: [(H + 2 KV) D] that is added to the product, or None.
        norms: [D] scales of RMS norms of each head of queries and of keys, and the
            number added to the mean square; or None.
        rotation: Cosines and sines of each token, float32[N, 1, half], by which halves
            of channels rotate; None for no rotation.
        query_scale: Factor of the rotated queries.
        split: Function that returns the finished queries, keys and values instead.
    """

    product: Float[Array, "N 1 F"]
    bias: Float[Array, " F"] | None
    norms: tuple[Array, Array, float] | None
    rotation: tuple[Array, Array] | None
    query_scale: float
    split: Callable[[], Heads]

    def write(
        self, pools: tuple[Array, Array], *places: Array
    ) -> tuple[Float[Array, "N 1 H D"], tuple[Array, Array]]:
        """Writes keys and values to pools; returns rotated queries, and the pools.

        `places` are pages, starts and counts of the tokens, each of another row.
        """
        num_tokens, _, _ = self.product.shape
        rotation = self.rotation
        if rotation is not None:
            shape = num_tokens, rotation[0].shape[-1]
            cos, sin = (jnp.broadcast_to(x[:, 0], shape) for x in rotation)
            rotation = cos, sin
        q, *written = rotate_and_write(
            self.product[:, 0],
            *pools,
            *places,
            bias=self.bias,
            norms=self.norms,
            rotation=rotation,
            query_scale=self.query_scale,
            early=True,
        )
        return q, (written[0], written[1])


def finish(q: Any, k: Any, v: Any, stored: Any) -> tuple[jax.Array, Any, Any, Any]:
    """Returns the arguments of an `attend` with queries, keys and values as arrays."""
    if not isinstance(q, Projections):
        return q, k, v, stored
    q, k, v = q.split()
    return q, k, v, (k, v)
