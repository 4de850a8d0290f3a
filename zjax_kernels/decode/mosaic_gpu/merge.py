"""Merge of outputs over shares of the keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from zjax_kernels.sparse.mosaic_gpu.arithmetic import per_row


class Merged(NamedTuple):
    """Attention over the shares of the keys so far.

    Args:
        out: float32[rows, channels] weighted sum of outputs.
        level: float32[rows] largest log-sum-exp; -inf for rows that see no key.
        total: float32[rows] sum of weights.
    """

    out: Array
    level: Array
    total: Array

    @classmethod
    def of(cls, out: Array, lse: Array) -> "Merged":
        """Returns attention over one share; see `add`."""
        return cls(out, lse, jnp.where(lse == -jnp.inf, 0.0, 1.0))

    def add(self, out: Array, lse: Array) -> "Merged":
        """Adds a share of the keys.

        Args:
            out: float32[rows, channels] outputs; 0 for rows that see no key.
            lse: float32[rows] log-sum-exps of the scores; -inf for rows that see no
                key.

        Returns:
            Attention over both.
        """
        level = jnp.maximum(self.level, lse)
        # -inf minus -inf is NaN, in rows that have seen no key.
        finite = _finite(level)
        before, weight = jnp.exp(self.level - finite), jnp.exp(lse - finite)
        shape = out.shape
        total = self.out * per_row(before, shape) + out * per_row(weight, shape)
        return Merged(total, level, self.total * before + weight)

    def finish(self, sinks: Array | None = None) -> Array:
        """Returns the outputs, float32[rows, channels]; 0 for rows that see no key.

        `sinks` are float32[rows] scores of a key without a value, or None.
        """
        total = self.total
        if sinks is not None:
            total += jnp.exp(sinks - _finite(self.level))
        factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
        return self.out * per_row(factor, self.out.shape)


def _finite(level: Array) -> Array:
    """Returns levels, or 0 for rows that have seen no key."""
    return jnp.where(level == -jnp.inf, 0.0, level)
