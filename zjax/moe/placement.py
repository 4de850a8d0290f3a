"""Mesh axes that split tokens and experts, where no `jax.shard_map` has split them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from zjax.sharding import mesh as meshes
from zjax.sharding.rules import entry

_TOKEN_AXES = (*meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR)


class Placement(NamedTuple):
    """The axes over which a layer splits its arrays.

    Args:
        tokens: Axes of the tokens.
        experts: Axes of the experts.
        hidden: Axes of the hidden channels of each expert.
    """

    tokens: tuple[str, ...]
    experts: tuple[str, ...]
    hidden: tuple[str, ...]

    @classmethod
    def of(
        cls, num_tokens: int, num_experts: int, hidden_size: int
    ) -> "Placement | None":
        """The placement on the mesh in use.

        Args:
            num_tokens: Tokens of the devices together.
            num_experts: Experts of the devices together.
            hidden_size: Hidden channels of each.

        Returns:
            None where no axis is left to the compiler.

        Example:
            >>> Placement.of(8, 4, 16) is None
            True
        """
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {a: mesh.shape[a] for a in meshes.AXES if a in mesh.auto_axes}
        if all(size == 1 for size in sizes.values()):
            return None

        def dividing(size: int, axes: Sequence[str]) -> tuple[str, ...]:
            found: tuple[str, ...] = ()
            for axis in axes:
                longer = (*found, axis)
                is_split = sizes.get(axis, 1) > 1
                if is_split and size % meshes.num_shares(mesh, longer) == 0:
                    found = longer
            return found

        return cls(
            tokens=dividing(num_tokens, _TOKEN_AXES),
            experts=dividing(num_experts, (meshes.EXPERT,)),
            hidden=dividing(hidden_size, (meshes.TENSOR,)),
        )

    @property
    def token_spec(self) -> P:
        """Spec of an array whose first dim are tokens."""
        return P(entry(self.tokens))

    def hidden_spec(self, dim: int) -> P:
        """Spec of a parameter whose first dim are experts, and one hidden channels."""
        between = (None,) * (dim - 1)
        return P(entry(self.experts), *between, entry(self.hidden))

    @property
    def expert_spec(self) -> P:
        """Spec of a parameter whose first dim are experts."""
        return P(entry(self.experts))
