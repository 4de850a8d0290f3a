"""Values that a weight may have: codes of few bits times scales of groups."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.ops import rounding
from zjax.settings.quantize import Weights


class Grid(NamedTuple):
    """Type of the codes of a matrix, and the groups that share scales."""

    weights: Weights
    """Type of the codes; not `compute`."""
    group_size: int
    """Most inputs that share a scale; 0 is all inputs."""
    dtype: str = "float32"
    """Dtype to which scales are rounded, as files store them."""

    def group_of(self, num_inputs: int) -> int:
        """Returns the number of inputs that share a scale."""
        return rounding.group_size(num_inputs, self.group_size)

    def scales(self, kernel: Float[Array, "K M"]) -> Float[Array, "groups M"]:
        """Returns the scale of each group, float32 with the precision of `dtype`."""
        kernel = kernel.astype(jnp.float32)
        given = self.weights, self.group_size, self.dtype
        return rounding.scales_of(kernel, *given).astype(jnp.float32)

    def nearest(
        self, values: Float[Array, "K M"], scales: Float[Array, "groups M"]
    ) -> Float[Array, "K M"]:
        """Returns the nearest values on the grid of given scales, float32."""
        codes = rounding.codes_of(values, scales, self.weights)
        return rounding.dequantize(codes, scales.astype(jnp.float32))


class Rounded(NamedTuple):
    """A matrix on a grid."""

    values: Float[Array, "K M"]
    """Codes times scales, float32."""
    scales: Float[Array, "groups M"]
    """Scale of each group of inputs, for each output, float32."""


def round_to_nearest(kernel: Float[Array, "K M"], grid: Grid) -> Rounded:
    """Rounds each weight to the nearest value of the grid.

    Args:
        kernel: Matrix [K, M] from K inputs to M outputs.
        grid: Values that a weight may have; the largest weight of a group takes the
            last code.

    Returns:
        Matrix on the grid and scales, float32.

    Example:
        >>> kernel = jnp.array([[7.0], [-1.6]])
        >>> round_to_nearest(kernel, Grid("int4", 0)).values.tolist()
        [[7.0], [-2.0]]
    """
    scales = grid.scales(kernel)
    return Rounded(grid.nearest(kernel, scales), scales)
