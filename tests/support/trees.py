"""Comparison of trees of arrays."""

import jax
import numpy as np

from zjax.sharding.layers import is_layers


def unpadded(arrays, rows):
    """Stored arrays, wherever they are, as arrays of NumPy in their logical shapes."""

    def cut(x, row):
        return np.asarray(x)[tuple(map(slice, row.shape))]

    return jax.tree.map(cut, arrays, rows)


def stacked(tree):
    """Layers that are stored apart as arrays of NumPy, which compiles nothing."""

    def stack(x):
        return jax.tree.map(lambda *rows: np.stack(rows), *x) if is_layers(x) else x

    return jax.tree.map(stack, tree, is_leaf=is_layers)


def assert_close(found, expected, **tolerances):
    """Holds each array of a tree to the array in the same place of another."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **tolerances), found, expected
    )
