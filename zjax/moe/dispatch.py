"""Dispatch of tokens to experts: capacity, rows sorted by expert, mesh placement."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size
from zjax.sharding.mesh import entry
from zjax_kernels import copy_rows

Drop = Literal["none", "position", "first_choices", "probability", "random"]
"""Rule by which an expert above capacity selects tokens: `position` keeps the first in
the batch, `first_choices` all first choices before all second choices (GShard),
`probability` the largest scores, `random` a random subset (DeepSpeed-MoE). `none` drops
nothing."""


def keep_within_capacity(
    experts: Int[Array, "T K"],
    scores: Float[Array, "T K"],
    chosen: Bool[Array, "T K"],
    capacity: int,
    drop: Drop,
    key: jax.Array | None,
) -> Bool[Array, "T K"]:
    """Returns the mask of the choices that experts of a given capacity keep.

    Choices outside `chosen` are never kept and take no capacity; among equal choices
    the earlier token stays. `drop` is not `none`, and `random` needs a key.

    Example:
        >>> experts = jnp.array([[0], [0], [0]])
        >>> scores, chosen = jnp.array([[0.2], [0.9], [0.5]]), jnp.ones((3, 1), bool)
        >>> kept = keep_within_capacity(experts, scores, chosen, 2, "probability", None)
        >>> kept[:, 0].tolist()
        [False, True, True]
    """
    # Choices that do not count sort behind all experts, where they take no capacity.
    expert = jnp.where(chosen, experts, jnp.iinfo(jnp.int32).max).ravel()
    order = _order(scores, drop, key).ravel()
    # Sorting is stable, and a flat index has the earlier token first.
    ranking = jnp.lexsort((order, expert))
    ranked = expert[ranking]
    first = jnp.searchsorted(ranked, ranked, side="left")
    position = jnp.arange(ranked.size) - first  # rank within the expert.
    kept = jnp.zeros(ranked.size, bool).at[ranking].set(position < capacity)
    return kept.reshape(experts.shape) & chosen


def _order(scores: jax.Array, drop: Drop, key: jax.Array | None) -> jax.Array:
    """Ranks all choices; an expert keeps the choices of the lowest ranks."""
    if drop == "random":
        assert key is not None
        return jax.random.uniform(key, scores.shape)
    if drop == "probability":
        return -scores  # sorting is ascending.
    dim = {"position": 0, "first_choices": 1}[drop]
    return jax.lax.broadcasted_iota(jnp.int32, scores.shape, dim)


_MOST_AT_ONCE = 16
"""Most choices of a token that one gather reads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Rows of experts, sorted by expert, and the token of each row.

    Args:
        token: int32[R], token of each row; T in a row without a token.
        expert: int32[R], expert of each row; E in a row without an expert.
        row: int32[T, K], row of each choice; R or more for a choice without a row.
        sizes: int32[E], number of rows of each expert; rows without an expert come
            last.
        is_padded: Whether rows without a token may stand before rows with one; static.
    """

    token: Any
    expert: Any
    row: Any
    sizes: Any
    is_padded: bool = dataclasses.field(default=False, metadata={"static": True})

    def first(self, num_rows: int) -> "Dispatch":
        """Cuts the dispatch to `num_rows` rows; no row cut off has an expert."""
        token, expert = self.token[:num_rows], self.expert[:num_rows]
        return dataclasses.replace(self, token=token, expert=expert)

    def rows_of(self, tokens: Float[Array, "T M"]) -> Float[Array, "R M"]:
        """Gathers the token of each row; 0 for a row without a token."""
        # `copy_rows` requires a token for every row.
        if self.is_padded:
            return _take(tokens, self.token)
        return copy_rows(tokens, self.token, self.row)

    def combine(
        self, rows: Float[Array, "R M"], weights: Float[Array, "T K"] | None = None
    ) -> Float[Array, "T M"]:
        """Sums the rows of each token in float32, in the order of the choices."""
        # In expert choice K is E: one gather would build T x E rows, most of them 0.
        if self.row.shape[1] > _MOST_AT_ONCE:
            return self._combine_in_turn(rows, weights)
        chosen = _take(rows, self.row).astype(jnp.float32)
        return (chosen if weights is None else chosen * weights[..., None]).sum(1)

    def _combine_in_turn(self, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
        """Sums the rows of each token, adding one row per token in each iteration."""
        # Choices with a row come first, in order of rows, so that the loop can end
        # early.
        order = jnp.argsort(self.row, axis=1)
        row = jnp.take_along_axis(self.row, order, 1)
        factors = jnp.ones(row.shape, jnp.float32)
        if weights is not None:
            factors = jnp.take_along_axis(weights, order, 1)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            chosen = _take(rows, row[:, i]).astype(jnp.float32)
            return total + chosen * factors[:, i, None]

        most = (row < len(rows)).sum(1).max()
        total = jnp.zeros((len(row), rows.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, most, add, total)

    def values_of(self, choices: Float[Array, "T K"]) -> Float[Array, " R"]:
        """Scatters one value per choice to the row of the choice."""
        rows = jnp.zeros(self.token.shape, choices.dtype)
        return rows.at[self.row.ravel()].set(choices.ravel(), mode="drop")

    def choices_of(self, values: Float[Array, " R"]) -> Float[Array, "T K"]:
        """Gathers the value of each choice's row; 0 for a choice without a row."""
        return _take(values, self.row)


def sort_by_expert(
    experts: Int[Array, "T K"], num_experts: int, max_rows: int | None = None
) -> Dispatch:
    """Sorts the choices of all tokens by expert, earlier tokens first.

    Choices of expert `num_experts` or more come last; `max_rows` bounds the number of
    lower choices.
    """
    # `segment_sum` drops the one index that all choices without an expert share.
    flat = jnp.minimum(experts.ravel(), num_experts)
    order = jnp.argsort(flat, stable=True)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    # `row` keeps indices beyond `max_rows`: gathers fill such choices with 0.
    order = order[:max_rows]
    sizes = jax.ops.segment_sum(jnp.ones_like(flat), flat, num_experts)
    return Dispatch(
        token=order // experts.shape[1],
        expert=flat[order],
        row=row.reshape(experts.shape),
        sizes=sizes.astype(jnp.int32),
    )


def pad_experts(dispatch: Dispatch, num_tokens: int, capacity: int) -> Dispatch:
    """Pads the rows of every expert, at most `capacity`, to `capacity` rows."""
    num_experts = dispatch.sizes.size
    first = jnp.cumsum(dispatch.sizes) - dispatch.sizes
    position = jnp.arange(dispatch.token.size) - first[dispatch.expert]
    padded = dispatch.expert * capacity + position
    # Rows without an expert go out of range, and the scatter drops them.
    padded = jnp.where(dispatch.expert < num_experts, padded, num_experts * capacity)
    token = jnp.full(num_experts * capacity, num_tokens, dispatch.token.dtype)
    return Dispatch(
        token=token.at[padded].set(dispatch.token, mode="drop"),
        expert=jnp.repeat(jnp.arange(num_experts), capacity),
        row=_take(padded, dispatch.row, num_experts * capacity),
        sizes=jnp.full_like(dispatch.sizes, capacity),
        is_padded=True,
    )


def _take(x: jax.Array, indices: jax.Array, fill: int = 0) -> jax.Array:
    return jnp.take(x, indices, axis=0, mode="fill", fill_value=fill)


class Placement(NamedTuple):
    """Mesh axes over which a layer splits the experts.

    Args:
        experts: Mesh axes that split the experts; empty for none.
        hidden: Mesh axes that split the hidden channels of each expert; empty for none.
    """

    experts: tuple[str, ...]
    hidden: tuple[str, ...]

    @classmethod
    def of(cls, num_experts: int, hidden_size: int) -> "Placement":
        """Returns the placement of a layer of experts on the mesh in use.

        Example:
            >>> Placement.of(4, 16)
            Placement(experts=(), hidden=())
        """
        return cls(
            experts=_dividing_axes(num_experts, (meshes.EXPERT,)),
            hidden=_dividing_axes(hidden_size, (meshes.TENSOR,)),
        )

    def spec(self, hidden_dim: int | None = None) -> P:
        """Returns the spec of a parameter [E, ...] with hidden dim `hidden_dim`."""
        if hidden_dim is None:
            return P(entry(self.experts))
        between = (None,) * (hidden_dim - 1)
        return P(entry(self.experts), *between, entry(self.hidden))


def token_spec(num_tokens: int) -> P:
    """Returns the spec of an array [T, ...] on the mesh in use."""
    axes = (*meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR)
    return P(entry(_dividing_axes(num_tokens, axes)))


def _dividing_axes(size: int, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the Auto axes, major first, that together divide a size."""
    mesh = jax.sharding.get_abstract_mesh()
    found: tuple[str, ...] = ()
    for axis in axes:
        longer = (*found, axis)
        # An axis that does not divide is skipped: the array is replicated over it.
        if open_size(axis) > 1 and size % meshes.num_shares(mesh, longer) == 0:
            found = longer
    return found
