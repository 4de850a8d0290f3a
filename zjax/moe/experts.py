"""Feed-forward experts: rows sorted by expert, two grouped products, weighted sums.

The backward pass reads the tokens, the pre-activations and the routing. The gradient of
a routing weight follows from the activations and cotangents; neither the outputs
of the experts nor the cotangents of the outputs are stored.

References: MegaBlocks, arXiv:2211.15841; SonicMoE, arXiv:2512.14080, section 4.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from zjax.errors import PlanError, Problem
from zjax.moe.dispatch import Placement, token_spec
from zjax.moe.exchange import AllGather, AllToAll, make_exchange
from zjax.moe.router import Routing
from zjax.ops import activation as activations
from zjax.ops.tokens import ROUTED
from zjax.sharding.activations import open_size
from zjax_kernels import (
    grouped_activation,
    grouped_activation_backward,
    grouped_matmul,
    grouped_outer,
    grouped_sum,
)
from zjax_kernels.grouped.reference import Activation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Parameters of all experts.

    Args:
        up: Input matrices [E, M, F], or [E, M, 2 F] for `swiglu`: gates, then values.
        down: Output matrices [E, F, M].
        up_bias: Biases of the hidden channels, [E, F] or [E, 2 F]; None for none.
        down_bias: Biases of the outputs, [E, M]; None for none.
        split: Axes of an enclosing `jax.shard_map` over which F is split; static.
    """

    up: Any
    down: Any
    up_bias: Any = None
    down_bias: Any = None
    split: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def parted(self, placement: Placement) -> tuple["Experts", "Experts"]:
        """Returns arrays that `jax.shard_map` can split, and the specs of the arrays.

        Gates and values of `swiglu` get a dim, so that both split into equal parts.
        """
        specs = {"up": placement.spec(3), "down": placement.spec(1)}
        specs |= {"up_bias": placement.spec(2), "down_bias": placement.spec()}
        parts = self._with_hidden(-1, self.down.shape[1])
        given = {n: x for n, x in specs.items() if getattr(self, n) is not None}
        return parts, dataclasses.replace(parts, **given)

    def joined(self, placement: Placement) -> "Experts":
        """Returns the arrays of one device from the device's shards of `parted`."""
        return dataclasses.replace(self.with_merged_gates(), split=placement.hidden)

    def first_bias(self) -> jax.Array | None:
        """Returns the biases of outputs on the first device of those that add up."""
        if not self.split or self.down_bias is None:
            return self.down_bias
        is_first = jax.lax.axis_index(self.split) == 0
        return jnp.where(is_first, self.down_bias, 0)

    def with_merged_gates(self) -> "Experts":
        """Merges the dims of gates and values of `swiglu` into one hidden dim."""
        return self._with_hidden(-1)

    def _with_hidden(self, *sizes: int) -> "Experts":
        """Reshapes the hidden dim of `up` and of `up_bias` to dims of given sizes."""
        up, bias = self.up, self.up_bias
        return dataclasses.replace(
            self,
            up=up.reshape(*up.shape[:2], *sizes),
            up_bias=None if bias is None else bias.reshape(len(bias), *sizes),
        )


def apply_experts(
    x: Float[Array, "T M"],
    experts: Experts,
    routing: Routing,
    *,
    activation: Activation = "swiglu",
) -> Float[Array, "T M"]:
    """Adds up the outputs of each token's experts by their weights.

    Args:
        x: Tokens, in the dtype to compute in.
        experts: Parameters in the dtype of `x`; the local experts inside
            `jax.shard_map` over the axis `expert`.
        routing: Routing of the tokens `x`.
        activation: Name of the function between the two products of an expert.

    Returns:
        Sums [T, M] in the dtype of `x`, added up in float32; 0 for a token that all
        experts dropped.

    Raises:
        PlanError: The routing has another number of tokens than `x`, or more experts
            than the devices have.
    """
    num_tokens, num_experts = routing.scores.shape
    if len(x) != num_tokens:
        problem = f"is not the number of tokens of the routing, {num_tokens}"
        raise PlanError(Problem("x.shape[0]", len(x), problem, "route the same tokens"))
    run = functools.partial(_apply_on_device, activation, num_experts, routing.capacity)
    # No expert computes a choice of index `num_experts`.
    choices = jnp.where(routing.kept, routing.experts, num_experts)
    mesh = jax.sharding.get_abstract_mesh()
    if any(open_size(axis) > 1 for axis in mesh.auto_axes):
        placement = Placement.of(len(experts.up), experts.down.shape[1])
        run = _map_devices(run, placement, token_spec(len(x)))
    return run(x, experts, choices, routing.weights)


def _map_devices(
    run: Callable[..., jax.Array], placement: Placement, tokens: PartitionSpec
) -> Callable[..., jax.Array]:
    """Maps a per-device function over all Auto axes of the mesh in use."""

    def run_part(x: jax.Array, experts: Experts, *routing: jax.Array) -> jax.Array:
        return run(x, experts.joined(placement), *routing)

    def mapped(x: jax.Array, experts: Experts, *routing: jax.Array) -> jax.Array:
        parts, specs = experts.parted(placement)
        return jax.shard_map(
            run_part,
            in_specs=(tokens, specs, tokens, tokens),
            out_specs=tokens,
            axis_names=set(jax.sharding.get_abstract_mesh().auto_axes),
            check_vma=False,
        )(x, parts, *routing)

    return mapped


def _apply_on_device(
    activation: Activation,
    num_experts: int,
    capacity: int | None,
    x: jax.Array,
    experts: Experts,
    choices: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Exchanges the tokens of a device and applies the local experts."""
    exchange = make_exchange(
        choices,
        num_experts=num_experts,
        num_local=len(experts.up),
        capacity=capacity,
        split=experts.split,
    )
    # Policies of `jax.checkpoint` save the sorted order by name: sorting is expensive.
    exchange = jax.tree.map(lambda x: checkpoint_name(x, ROUTED), exchange)
    experts = dataclasses.replace(experts, down_bias=experts.first_bias())
    return _apply(activation, x, experts, weights, exchange)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    activation: Activation,
    x: jax.Array,
    experts: Experts,
    weights: jax.Array,
    exchange: AllGather | AllToAll,
) -> jax.Array:
    """Applies the local experts; the backward pass reads no output of an expert."""
    return _forward(activation, x, experts, weights, exchange)[0]


def _forward(
    activation: Activation,
    x: jax.Array,
    experts: Experts,
    weights: jax.Array,
    exchange: AllGather | AllToAll,
) -> tuple[jax.Array, Any]:
    """Computes the weighted sums and saves the pre-activations of `usual` rows."""
    arrived, shared = exchange.send(x), exchange.share_weights(weights)
    # Residuals have one shape for all loads, hence the rows of a usual load.
    saved_rows = exchange.usual

    def compute(exchange: Any, arrived: Any, experts: Any, shared: Any) -> Any:
        hidden, activated = _activate(activation, arrived, experts, exchange)
        outputs = grouped_matmul(
            activated, experts.down, exchange.sizes, bias=experts.down_bias
        )
        return exchange.sum_rows(outputs, shared, x.dtype), hidden[:saved_rows]

    sums, hidden = exchange.by_load(compute, arrived, experts, shared)
    # `elementwise` policies save inputs of activation functions under this name.
    hidden = checkpoint_name(hidden, activations.INPUT)
    combined = exchange.collect_sums(sums, shared)
    return combined, (arrived, hidden, experts, shared, exchange)


def _backward(
    activation: Activation, saved: Any, cotangent: jax.Array
) -> tuple[jax.Array, Experts, jax.Array, None]:
    """Returns the cotangents of tokens, experts and weights; the exchange has none."""
    *operands, shared, exchange = saved
    operands += exchange.row_weights(shared), exchange.send(cotangent)
    run = functools.partial(_differentiate, activation)
    sums, gradients, values = exchange.by_load(run, *operands)
    x_cotangent = exchange.collect_sums(sums, None)
    return x_cotangent, gradients, exchange.collect_values(values), None


def _differentiate(
    activation: Activation,
    exchange: AllGather | AllToAll,
    arrived: jax.Array,
    hidden: jax.Array,
    experts: Experts,
    weight: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, Experts, jax.Array]:
    """Returns one device's cotangents of received tokens, experts and weights."""
    dtype, sizes, rows = arrived.dtype, exchange.sizes, exchange.row_experts.size
    if rows > len(hidden):  # more rows than are saved
        hidden, _ = _activate(activation, arrived, experts, exchange)
    weight = weight[:rows]  # `exchange` may be cut to the usual rows.
    # Cotangents of the outputs of experts, before the routing weight.
    row_cotangent = exchange.rows_of(cotangent)
    hidden_cotangent, weighted, weight_cotangent = grouped_activation_backward(
        row_cotangent, experts.down, sizes, hidden, weight, activation=activation
    )
    if experts.down_bias is not None:
        own = _rows_of(experts.down_bias, exchange)
        # The kernel's product has the outputs without bias.
        weight_cotangent += _row_products(row_cotangent, own)
    gradients = dataclasses.replace(
        experts,
        up=grouped_outer(exchange.rows_of(arrived), hidden_cotangent, sizes),
        down=grouped_outer(weighted, row_cotangent, sizes),
        up_bias=_sum_by_expert(experts.up_bias, hidden_cotangent, sizes),
        down_bias=_sum_by_expert(experts.down_bias, row_cotangent, sizes, weight),
    )
    input_rows = grouped_matmul(hidden_cotangent, experts.up, sizes, transpose=True)
    # The kernels have applied the routing weights: every factor is 1.
    sums = exchange.sum_rows(input_rows, None, dtype)
    return sums, gradients, exchange.move_values(weight_cotangent)


_apply.defvjp(_forward, _backward)


def _activate(
    activation: Activation,
    arrived: jax.Array,
    experts: Experts,
    exchange: AllGather | AllToAll,
) -> tuple[jax.Array, jax.Array]:
    """Returns the pre-activations and the activations of all rows."""
    return grouped_activation(
        exchange.rows_of(arrived),
        experts.up,
        exchange.sizes,
        activation=activation,
        bias=experts.up_bias,
    )


def _rows_of(bias: jax.Array, exchange: AllGather | AllToAll) -> jax.Array:
    """Returns the bias of each row's expert; 0 in rows without an expert."""
    return jnp.take(bias, exchange.row_experts, axis=0, mode="fill", fill_value=0)


def _sum_by_expert(
    bias: jax.Array | None,
    rows: jax.Array,
    sizes: jax.Array,
    scale: jax.Array | None = None,
) -> jax.Array | None:
    """Returns the gradient of a bias; None without a bias."""
    return None if bias is None else grouped_sum(rows, sizes, scale=scale)


def _row_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the dot product of each pair of rows, in float32."""
    return (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)
