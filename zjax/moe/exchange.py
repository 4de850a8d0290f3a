"""Exchange of tokens between the devices of an expert-parallel layer.

Inside `jax.shard_map` over the axis `expert`, each device has tokens, and an equal
part of the experts. With `rows` as below, a device receives and sends (shares - 1) x
rows x width elements per exchange, of which there are two in each direction.

    exchange     rows             what every two devices exchange
    ---------------------------------------------------------------------------------
    all-gather   T                all tokens; the outputs are reduce-scattered
    all-to-all   E / shares x C   the rows of experts of capacity C, padding included

After an all-gather a device computes the choices of the local experts: at an even load
about as many rows as local tokens have choices, at most the choices of all tokens.
Buffers hold the usual rows; a conditional runs with all rows where the buffers are too
small. No token is dropped.

A tensor axis that splits experts also splits the tokens: rows received over `expert`
are gathered over `tensor`, and sums return in the opposite order. No token is sent
twice, and the exchange shrinks by the size of the tensor axis (duplicate token
dropping).

References: GShard, arXiv:2006.16668, section 3.2 (all-to-all); DeepSpeed-MoE,
arXiv:2201.05596, section 5; DeepSpeed-TED, arXiv:2303.06318, section 4.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.errors import PlanError, Problem
from zjax.moe.dispatch import Dispatch, pad_experts, sort_by_expert
from zjax.ops import tokens
from zjax.sharding.mesh import EXPERT, num_shares

_SLACK = 1.25
"""Rows of a usual load, as a multiple of the rows of an even load."""


class Choice(NamedTuple):
    """An exchange and the numbers of rows.

    Args:
        exchange: Name of the collective; `none` where every device has all experts.
        sent: Rows that each device sends to each peer, and receives back.
        usual: Rows of a device's experts at a load up to a quarter above an even one. A
            device saves pre-activations for as many rows.
        most: Most rows of a device's experts at any load.
        reason: Text that says why this exchange is chosen.
    """

    exchange: Literal["none", "all-gather", "all-to-all"]
    sent: int
    usual: int
    most: int
    reason: str


def choose_exchange(
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_shares: int,
    capacity: int | None = None,
) -> Choice:
    """Chooses the exchange that sends fewer rows.

    `num_tokens` counts the tokens of a device, `num_experts` the experts of all
    devices, and `capacity` the most tokens that an expert takes from a device. Without
    capacity one expert may take all tokens, and no smaller fixed number of rows is
    enough.

    Example:
        >>> sizes = {"num_tokens": 64, "top_k": 2, "num_experts": 8, "capacity": 16}
        >>> choose_exchange(**sizes, num_shares=8)[:4]
        ('all-to-all', 16, 128, 128)
        >>> del sizes["capacity"]
        >>> choose_exchange(**sizes, num_shares=4)[:4]
        ('all-gather', 64, 160, 512)
    """
    num_local = num_experts // num_shares
    bound = num_tokens if capacity is None else min(capacity, num_tokens)
    padded = num_local * bound
    most = num_shares * min(num_tokens * min(top_k, num_local), padded)
    usual = min(most, math.ceil(_SLACK * num_tokens * top_k))
    if num_shares == 1:
        # no row travels.
        return Choice("none", 0, most, most, "every device has all experts")
    if capacity is None:
        reason = "without capacity an expert may take every token"
        return Choice("all-gather", num_tokens, usual, most, reason)
    reason = f"experts of a device take {padded} rows of {num_tokens} tokens"
    # An all-gather sends `num_tokens` rows to each peer, an all-to-all `padded` rows.
    if padded < num_tokens:
        # Padding makes the usual and the largest load equal.
        rows = num_shares * padded
        return Choice("all-to-all", padded, rows, rows, reason)
    return Choice("all-gather", num_tokens, usual, most, reason)


def make_exchange(
    experts: Int[Array, "T K"],
    *,
    num_experts: int,
    num_local: int,
    capacity: int | None = None,
    split: tuple[str, ...] = (),
) -> "AllGather | AllToAll":
    """Plans the exchange of the tokens of a device.

    Index `num_experts` in `experts` stands for a dropped token. `split` names the mesh
    axes that split each expert.
    """
    num_tokens, top_k = experts.shape
    shares = _num_expert_shares(num_experts, num_local)
    choice = choose_exchange(
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_shares=shares,
        capacity=capacity,
    )
    if choice.exchange == "all-to-all":
        dispatch = sort_by_expert(experts, num_experts)
        padded = pad_experts(dispatch, num_tokens, choice.sent // num_local)
        return AllToAll(padded, num_local, split)
    axes = (EXPERT, *split) if shares > 1 else split
    gathered = tokens.gather(experts, axes)
    if shares > 1:
        # Experts of other devices become index `num_local`, whose rows come last.
        gathered = gathered - jax.lax.axis_index(EXPERT) * num_local
        is_local = (gathered >= 0) & (gathered < num_local)
        gathered = jnp.where(is_local, gathered, num_local)
    # Tokens are gathered over `split`, too: a device sees that many times more.
    copies = num_shares(jax.sharding.get_abstract_mesh(), split)
    dispatch = sort_by_expert(gathered, num_local, copies * choice.most)
    return AllGather(dispatch, copies * choice.usual, axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllGather:
    """Exchange that gathers all tokens on every device and reduce-scatters outputs.

    Args:
        dispatch: Rows of the local experts, from the tokens of all devices.
        usual: Most rows at a usual load; static.
        axes: Mesh axes over which tokens are gathered, in order; empty where a device
            has all experts. Static.
    """

    dispatch: Dispatch
    usual: int = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def sizes(self) -> Int[Array, " E"]:
        """Rows of each local expert."""
        return self.dispatch.sizes

    @property
    def row_experts(self) -> Int[Array, " R"]:
        """Local expert of each row."""
        return self.dispatch.expert

    def send(self, x: Float[Array, "T M"]) -> Float[Array, "S M"]:
        """Sends tokens, or token cotangents, to the devices of the chosen experts."""
        return tokens.gather(x, self.axes)

    def share_weights(self, weights: Float[Array, "T K"]) -> Float[Array, "S K"]:
        """Sends routing weights to the devices that weight rows in `sum_rows`."""
        return tokens.gather(weights, self.axes)

    def rows_of(self, arrived: Float[Array, "S M"]) -> Float[Array, "R M"]:
        """Sorts arrays that `send` returned into rows of the local experts."""
        return self.dispatch.rows_of(arrived)

    def row_weights(self, shared: Float[Array, "S K"]) -> Float[Array, " R"]:
        """Returns the weight of each row from the result of `share_weights`."""
        return self.dispatch.values_of(shared)

    def by_load(self, run: Callable[..., Any], *operands: Any) -> Any:
        """Calls `run(exchange, *operands)` with `usual` rows if the load allows.

        `run` uses no collectives, and returns equal shapes for any number
        of rows.
        """
        if self.usual == self.dispatch.token.size:
            return run(self, *operands)
        few = dataclasses.replace(self, dispatch=self.dispatch.first(self.usual))
        is_usual = self.sizes.sum() <= self.usual
        runs = (functools.partial(run, exchange) for exchange in (few, self))
        # Devices may take different branches, hence no collectives in `run`.
        return jax.lax.cond(is_usual, *runs, *operands)

    def sum_rows(
        self, rows: Float[Array, "R M"], shared: Float[Array, "S K"] | None, dtype: Any
    ) -> Float[Array, "S M"]:
        """Sums the local rows of each token, in `dtype` for the reduce-scatter."""
        return self.dispatch.combine(rows, shared).astype(dtype)

    def collect_sums(
        self, sums: Float[Array, "S M"], shared: Float[Array, "S K"] | None
    ) -> Float[Array, "T M"]:
        """Adds up the results of `sum_rows` on the device of each token."""
        return tokens.reduce_scatter(sums, self.axes)

    def move_values(self, values: Float[Array, " R"]) -> Float[Array, "S K"]:
        """Moves one value per local row to the choice of the row."""
        return self.dispatch.choices_of(values)

    def collect_values(self, values: Float[Array, "S K"]) -> Float[Array, "T K"]:
        """Returns the results of `move_values` to the devices of the tokens."""
        return tokens.reduce_scatter(values, self.axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Exchange of a fixed number of rows per expert between every two devices.

    The methods mirror `AllGather`.

    Args:
        dispatch: Rows of all experts from the local tokens, equally many per expert.
        num_local: Number of experts of a device; static.
        split: Mesh axes that split each expert, over which rows are gathered; static.
    """

    dispatch: Dispatch
    num_local: int = dataclasses.field(metadata={"static": True})
    split: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def usual(self) -> int:
        """Number of rows, whatever the load."""
        return self.num_local * self._rows_per_expert

    @property
    def sizes(self) -> Int[Array, " E"]:
        """Rows of each local expert, including rows without a token."""
        return jnp.full(self.num_local, self._rows_per_expert, jnp.int32)

    @property
    def row_experts(self) -> Int[Array, " R"]:
        """Local expert of each row."""
        return jnp.repeat(jnp.arange(self.num_local), self._rows_per_expert)

    def send(self, x: Float[Array, "T M"]) -> Float[Array, "R M"]:
        """Sends rows to the devices of the rows' experts."""
        return self._send(self.dispatch.rows_of(x))

    def share_weights(self, weights: Float[Array, "T K"]) -> Float[Array, "T K"]:
        """Returns the weights, as each device weights the rows of local tokens."""
        return weights

    def rows_of(self, arrived: Float[Array, "R M"]) -> Float[Array, "R M"]:
        """Sorts rows from the order of devices into the order of experts."""
        return self._by_expert(arrived)

    def row_weights(self, shared: Float[Array, "T K"]) -> Float[Array, " R"]:
        """Sends the weight of each row to the device of the row's expert."""
        return self._by_expert(self._send(self.dispatch.values_of(shared)))

    def by_load(self, run: Callable[..., Any], *operands: Any) -> Any:
        """Returns `run(exchange, *operands)`; the number of rows is fixed."""
        return run(self, *operands)

    def sum_rows(
        self, rows: Float[Array, "R M"], shared: Float[Array, "T K"] | None, dtype: Any
    ) -> Float[Array, "R M"]:
        """Returns the rows unchanged, as the device of each token sums the rows."""
        return rows

    def collect_sums(
        self, sums: Float[Array, "R M"], shared: Float[Array, "T K"] | None
    ) -> Float[Array, "T M"]:
        """Returns rows to the tokens' devices, and sums the rows of each token."""
        return self.dispatch.combine(self._return(sums), shared).astype(sums.dtype)

    def move_values(self, values: Float[Array, " R"]) -> Float[Array, " R"]:
        """Returns the values unchanged: the tokens' devices move values to choices."""
        return values

    def collect_values(self, values: Float[Array, " R"]) -> Float[Array, "T K"]:
        """Returns one value per row to the choice of the row."""
        return self.dispatch.choices_of(self._return(values))

    @property
    def _rows_per_expert(self) -> int:
        """Rows of a local expert from all devices."""
        copies = num_shares(jax.sharding.get_abstract_mesh(), self.split)
        return copies * self.dispatch.token.size // self.num_local

    def _send(self, rows: jax.Array) -> jax.Array:
        """Exchanges rows over `expert`, then gathers over `split`."""
        return tokens.gather(tokens.all_to_all(rows, EXPERT), self.split)

    def _by_expert(self, rows: jax.Array) -> jax.Array:
        """Transposes received blocks [device, expert] to the order of experts."""
        capacity = self.dispatch.token.size // self.dispatch.sizes.size
        blocks = rows.reshape(-1, self.num_local, capacity, *rows.shape[1:])
        return blocks.swapaxes(0, 1).reshape(rows.shape)

    def _return(self, rows: jax.Array) -> jax.Array:
        """Inverts `_send` and `_by_expert`, summing rows over `split`."""
        capacity = self.dispatch.token.size // self.dispatch.sizes.size
        blocks = rows.reshape(self.num_local, -1, capacity, *rows.shape[1:])
        by_device = blocks.swapaxes(0, 1).reshape(rows.shape)
        return tokens.all_to_all(tokens.reduce_scatter(by_device, self.split), EXPERT)


def _num_expert_shares(num_experts: int, num_local: int) -> int:
    """Returns the number of devices over which the experts are split."""
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape[EXPERT] if EXPERT in mesh.manual_axes else 1
    # Without an `expert` axis, or with replicated experts, nothing is exchanged.
    if num_local == num_experts:
        return 1
    if num_local * size != num_experts:
        problem = f"is not the number of experts of one of {size} devices, which have "
        remedy = "name the first dim of the parameters `experts`, or change the router"
        problem += f"{num_experts} in all"
        raise PlanError(Problem("experts.up.shape[0]", num_local, problem, remedy))
    return size
