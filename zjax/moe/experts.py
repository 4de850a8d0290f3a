"""Feed-forward experts: tokens sorted by expert, computed, and added up again.

The backward pass reads the tokens, the pre-activations and the routing. The gradient of
a routing weight follows from the activations and the gradient of these, so that neither
the outputs of the experts nor their gradients are stored.

References: MegaBlocks, arXiv:2211.15841; SonicMoE, arXiv:2512.14080, section 4.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.moe.router import Routing, count_tokens
from zjax_kernels import grouped_matmul, grouped_outer

Activation = Literal["swiglu", "gelu", "relu"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Parameters of all experts.

    Args:
        up: [E, M, F], or [E, M, 2 F] for `swiglu`: first the gates, then the values.
        down: [E, F, M].
        up_bias: [E, F] or [E, 2 F]; None for none.
        down_bias: [E, M]; None for none.
    """

    up: Any
    down: Any
    up_bias: Any = None
    down_bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Chosen experts in the order of the experts.

    Args:
        token: int32[T K], the token of each sorted row.
        expert: int32[T K], its expert; E where that dropped the token.
        row: int32[T, K], the sorted row of each choice.
        sizes: int32[E], rows of each expert; those of dropped tokens come last.
    """

    token: Any
    expert: Any
    row: Any
    sizes: Any


def sort_by_expert(routing: Routing) -> Dispatch:
    """Sorts the choices of all tokens by expert, earlier tokens first.

    Args:
        routing: Routing of T tokens.
    """
    num_experts, shape = routing.scores.shape[1], routing.experts.shape
    experts = jnp.where(routing.kept, routing.experts, num_experts).ravel()
    order = jnp.argsort(experts, stable=True)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    sizes = count_tokens(routing.experts, routing.kept, num_experts)
    return Dispatch(
        token=order // shape[1],
        expert=experts[order],
        row=row.reshape(shape),
        sizes=sizes.astype(jnp.int32),
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
        x: Tokens.
        experts: Parameters in the dtype of `x`.
        routing: Routing of the tokens.
        activation: Function between the two products.

    Returns:
        In the dtype of `x`, summed in float32; 0 for a token that all experts dropped.

    Example:
        >>> from zjax.moe.router import Router, route
        >>> experts = Experts(up=jnp.ones((2, 1, 1)), down=jnp.ones((2, 1, 1)))
        >>> routing = route(jnp.array([[0.0, 0.0]]), Router(num_experts=2, top_k=2))
        >>> x = jnp.array([[3.0]])
        >>> float(apply_experts(x, experts, routing, activation="relu")[0, 0])
        3.0
    """
    dispatch = sort_by_expert(routing)
    return _apply(activation, x, experts, routing.weights, dispatch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    activation: Activation,
    x: jax.Array,
    experts: Experts,
    weights: jax.Array,
    dispatch: Dispatch,
) -> jax.Array:
    return _forward(activation, x, experts, weights, dispatch)[0]


def _forward(
    activation: Activation,
    x: jax.Array,
    experts: Experts,
    weights: jax.Array,
    dispatch: Dispatch,
) -> tuple[jax.Array, Any]:
    hidden = grouped_matmul(x[dispatch.token], experts.up, dispatch.sizes)
    hidden = _add_bias(hidden, experts.up_bias, dispatch)
    activated = _activate(activation)(hidden)
    outputs = grouped_matmul(activated, experts.down, dispatch.sizes)
    outputs = _add_bias(outputs, experts.down_bias, dispatch)
    combined = _combine(outputs, weights, dispatch).astype(x.dtype)
    return combined, (x, hidden, experts, weights, dispatch)


def _backward(
    activation: Activation, saved: Any, cotangent: jax.Array
) -> tuple[jax.Array, Experts, jax.Array, None]:
    x, hidden, experts, weights, dispatch = saved
    weight = jnp.zeros(dispatch.token.shape, weights.dtype)
    weight = weight.at[dispatch.row.ravel()].set(weights.ravel())[:, None]
    row_cotangent = cotangent[dispatch.token]  # before the routing weight
    down = experts.down.swapaxes(1, 2)
    activated_cotangent = grouped_matmul(row_cotangent, down, dispatch.sizes)
    activated, pull = jax.vjp(_activate(activation), hidden)
    weight_cotangent = _row_products(activated_cotangent, activated)
    if experts.down_bias is not None:
        own = _rows_of(experts.down_bias, dispatch)
        weight_cotangent += _row_products(row_cotangent, own)
    (hidden_cotangent,) = pull((activated_cotangent * weight).astype(x.dtype))
    weighted = (activated * weight).astype(x.dtype)
    gradients = Experts(
        up=grouped_outer(x[dispatch.token], hidden_cotangent, dispatch.sizes),
        down=grouped_outer(weighted, row_cotangent, dispatch.sizes),
        up_bias=_sum_by_expert(hidden_cotangent, experts.up_bias, dispatch),
        down_bias=_sum_by_expert(row_cotangent * weight, experts.down_bias, dispatch),
    )
    input_rows = grouped_matmul(
        hidden_cotangent, experts.up.swapaxes(1, 2), dispatch.sizes
    )
    x_cotangent = _combine(input_rows, jnp.ones_like(weights), dispatch).astype(x.dtype)
    return x_cotangent, gradients, weight_cotangent[dispatch.row], None


_apply.defvjp(_forward, _backward)


def _activate(activation: Activation) -> Callable[[jax.Array], jax.Array]:
    if activation == "swiglu":
        return _swiglu
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation]


def _swiglu(hidden: jax.Array) -> jax.Array:
    gate, value = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * value


def _combine(rows: jax.Array, weights: jax.Array, dispatch: Dispatch) -> jax.Array:
    """Sums the rows of each token in float32, always in the order of its choices."""
    chosen = rows[dispatch.row].astype(jnp.float32)
    return (chosen * weights[..., None]).sum(1)


def _rows_of(bias: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The bias of each row's expert; 0 in rows without one."""
    return jnp.take(bias, dispatch.expert, axis=0, mode="fill", fill_value=0)


def _add_bias(rows: jax.Array, bias: jax.Array | None, dispatch: Dispatch) -> jax.Array:
    return rows if bias is None else rows + _rows_of(bias, dispatch)


def _sum_by_expert(
    rows: jax.Array, bias: jax.Array | None, dispatch: Dispatch
) -> jax.Array | None:
    if bias is None:
        return None
    sums = jax.ops.segment_sum(
        rows.astype(jnp.float32),
        dispatch.expert,
        len(bias),
        indices_are_sorted=True,
    )
    return sums.astype(bias.dtype)


def _row_products(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)
