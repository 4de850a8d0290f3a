"""Comparison of trees of arrays."""

import jax
import numpy as np


def assert_close(found, expected, **tolerances):
    """Holds each array of a tree to the array in the same place of another."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **tolerances), found, expected
    )
