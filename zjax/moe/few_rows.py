"""Experts of few tokens, as in decoding: only the chosen experts are read, once each.

No token is sorted: an expert multiplies all rows, and a row has weight 0 for experts
that the row did not choose.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.moe.experts import Experts
from zjax.moe.router import Router, RouterArrays, route, router_logits
from zjax_kernels import Choice, choose_experts, few_rows_experts
from zjax_kernels.decode.product.reference import Activation

MAX_ROWS = 64
"""Tokens up to which reading experts takes longer than multiplying all rows by them."""
Norm = tuple[jax.Array, float] | None
"""Scale and number added to the mean square of an RMS norm of the tokens."""


def mix_few_rows(
    x: Float[Array, "N M"],
    router: RouterArrays,
    experts: Experts,
    settings: Router,
    *,
    activation: Activation,
    token_mask: Bool[Array, " N"] | None = None,
    norm: Norm = None,
    residual: Float[Array, "N M"] | None = None,
) -> tuple[Float[Array, "N M"], Choice]:
    """Adds up the outputs of each token's experts by their weights.

    Args:
        x: Tokens, in the dtype to compute in.
        router: Parameters of the router, with a matrix from `lay_router` if
            `chooses_in_kernel(settings)`.
        experts: Parameters of the program in the dtype of `x`: all experts, or shards
            of each inside `jax.shard_map`.
        settings: Settings of the router, which drop no token.
        activation: Name of the function between the two products of an expert.
        token_mask: False for padding, which no expert is read for; None without.
        norm: RMS norm of the tokens, which needs `chooses_in_kernel(settings)`.
        residual: Term of the result, for experts that are not split; None for none.

    Returns:
        Sums in the dtype of `x`, added up in float32, and the choice. There is no
        gradient.
    """
    choose = _choose if chooses_in_kernel(settings) else _route
    choice = choose(x, router, settings, token_mask, norm)
    y = few_rows_experts(
        x,
        choice,
        experts.up,
        experts.down,
        norm=norm,
        activation=activation,
        residual=residual,
        up_bias=experts.up_bias,
        down_bias=experts.first_bias(),
        early=True,
    )
    return jax.lax.psum(y, experts.split) if experts.split else y, choice


def chosen_by(choice: Choice, settings: Router, num_rows: int) -> Int[Array, "N K"]:
    """Returns the experts of each row of a choice, the largest weight first."""
    gates = choice.gates[: settings.num_experts, :num_rows]
    return jax.lax.top_k(gates.T, settings.top_k)[1]


def chooses_in_kernel(settings: Router) -> bool:
    """Whether one kernel computes logits and choice: it knows no groups."""
    return settings.num_groups == settings.top_groups


def router_kernel(
    matrix: Float[Array, "N C"], embed_size: int, num_experts: int
) -> Float[Array, "M E"]:
    """Returns the router's matrix that `lay_router` laid, to the last bit."""
    first, *others = jnp.split(matrix[:, :num_experts], len(matrix) // embed_size)
    if not others:
        return first
    terms = [x.astype(jnp.float32) for x in (first, *others)]
    # The smallest first: no sum is rounded.
    return sum(terms[-2::-1], start=terms[-1])


def _choose(
    x: jax.Array,
    router: RouterArrays,
    settings: Router,
    token_mask: jax.Array | None,
    norm: Norm,
) -> Choice:
    """Chooses in one kernel."""
    return choose_experts(
        x,
        router.kernel,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        scores=settings.scores,
        normalise=settings.normalise,
        scale=settings.scale,
        bias=router.bias,
        logit_bias=router.logit_bias,
        counts=token_mask,
        norm=norm,
        early=True,
    )


def _route(
    x: jax.Array,
    router: RouterArrays,
    settings: Router,
    token_mask: jax.Array | None,
    norm: Norm,
) -> Choice:
    """Chooses as training does."""
    assert norm is None
    logits = router_logits(x, router.kernel, bias=router.logit_bias)
    routing = route(logits, settings, bias=router.bias, counts=token_mask)
    gates = jnp.zeros((settings.num_experts, len(x)), jnp.float32)
    rows = jnp.arange(len(x))[:, None]
    gates = gates.at[routing.experts, rows].set(routing.weights)
    return Choice.of(gates, min(settings.num_experts, routing.experts.size))
