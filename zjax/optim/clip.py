"""Clipping gradients by their global norm."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def global_norm(tree: Any) -> Float[Array, ""]:
    """Euclidean norm of all elements of a tree of floating arrays, summed in float32.

    Infinite if the sum of squares overflows, even if every element is finite.

    Example:
        >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
        5.0
    """
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(functools.reduce(jnp.add, squares, jnp.float32(0)))


def clip_by_norm(tree: Any, norm: Float[Array, ""], max_norm: float) -> Any:
    """Divides by `max(1, (norm + 1e-6) / max_norm)`, keeping dtypes.

    Args:
        tree: Arrays of floating dtype.
        norm: Global norm of the arrays.
        max_norm: Largest norm, above 0; `inf` changes nothing.

    Example:
        >>> clip_by_norm(jnp.array([3.0, 4.0]), jnp.float32(5), 1.0).round(3).tolist()
        [0.6000000238418579, 0.800000011920929]

    Reference:
        Pascanu et al., arXiv:1211.5063.
    """
    if max_norm == math.inf:
        return tree
    divisor = jnp.maximum(1, (norm + 1e-6) / max_norm)
    return jax.tree.map(lambda leaf: (leaf / divisor).astype(leaf.dtype), tree)
