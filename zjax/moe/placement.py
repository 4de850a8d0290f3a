"""Mesh axes that split tokens and experts, where no `jax.shard_map` has split them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size
from zjax.sharding.rules import entry


class Placement(NamedTuple):
    """The axes over which a layer splits its experts.

    Args:
        experts: Axes of the experts.
        hidden: Axes of the hidden channels of each expert.
    """

    experts: tuple[str, ...]
    hidden: tuple[str, ...]

    @classmethod
    def of(cls, num_experts: int, hidden_size: int) -> "Placement":
        """The placement on the mesh in use.

        Args:
            num_experts: Experts of the devices together.
            hidden_size: Hidden channels of each.

        Example:
            >>> Placement.of(4, 16)
            Placement(experts=(), hidden=())
        """
        return cls(
            experts=_dividing_axes(num_experts, (meshes.EXPERT,)),
            hidden=_dividing_axes(hidden_size, (meshes.TENSOR,)),
        )

    def spec(self, hidden_dim: int | None = None) -> P:
        """Spec of a parameter whose first dim are experts.

        Args:
            hidden_dim: Its dim of hidden channels, if it has one.
        """
        if hidden_dim is None:
            return P(entry(self.experts))
        between = (None,) * (hidden_dim - 1)
        return P(entry(self.experts), *between, entry(self.hidden))


def token_spec(num_tokens: int) -> P:
    """Spec of an array whose first dim are tokens, on the mesh in use."""
    axes = (*meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR)
    return P(entry(_dividing_axes(num_tokens, axes)))


def _dividing_axes(size: int, axes: Sequence[str]) -> tuple[str, ...]:
    """Axes that the compiler would split, whose product divides a size."""
    mesh = jax.sharding.get_abstract_mesh()
    found: tuple[str, ...] = ()
    for axis in axes:
        longer = (*found, axis)
        if open_size(axis) > 1 and size % meshes.num_shares(mesh, longer) == 0:
            found = longer
    return found
