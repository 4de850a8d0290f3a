"""Residuals of the backward pass: saved, recomputed, or passed between programs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.core as jax_core
from jax.ad_checkpoint import checkpoint_name

from zjax.jaxprs.program import CHEAP
from zjax.ops import activation, attention, sparse, token_chunks, tokens
from zjax.sharding.layers import read_layer
from zjax.typing import Params
from zjax_kernels import norm


@jax.custom_vjp
def materialize(x: jax.Array) -> jax.Array:
    """Stores an array in memory before anything reads it; gradients are unaffected.

    Without the barrier XLA may fuse an addition into a matrix product that becomes
    slower, or copy the second operand of the addition first. Forward-mode
    differentiation is not defined.
    """
    return jax.lax.optimization_barrier(x)


materialize.defvjp(
    lambda x: (jax.lax.optimization_barrier(x), None), lambda _, grad: (grad,)
)


@jax.custom_vjp
def materialize_gradient(x: jax.Array) -> jax.Array:
    """Stores the gradient of an array in memory before anything reads it.

    Without the barrier XLA may recompute an expensive gradient for each reader.
    Forward-mode differentiation is not defined.
    """
    return x


materialize_gradient.defvjp(
    lambda x: (x, None), lambda _, grad: (jax.lax.optimization_barrier(grad),)
)


Pull = TypeVar("Pull", bound=Callable[..., Any])


def residuals_of(pull: Any, operands: Any) -> list[jax.Array]:
    """Lists the arrays of a `jax.vjp` function that the forward program has to save.

    `operands` are arrays that the backward program also gets. Call it while tracing.
    """
    known = set(map(id, jax.tree.leaves(operands)))
    # Concrete arrays are constants of both programs.
    traced = [x for x in jax.tree.leaves(pull) if isinstance(x, jax_core.Tracer)]
    # By identity, as tracers do not compare; a dict keeps the order of both programs
    # equal.
    return list({id(x): x for x in traced if id(x) not in known}.values())


def vjp_with(residuals: Sequence[jax.Array], pull: Pull, operands: Any) -> Pull:
    """Puts the residuals of a forward program into a `jax.vjp` function.

    `pull` comes from `jax.vjp` of the function of the forward program, traced anew;
    `operands` are as for `residuals_of`.

    Example:
        >>> x, y, nothing = map(jax.numpy.float32, (3, 2, 0))
        >>> def forward(x, y):
        ...     return residuals_of(jax.vjp(lambda x: jax.numpy.sin(x) * y, x)[1], y)
        >>> def backward(residuals, y, x):
        ...     _, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, x)
        ...     return vjp_with(residuals, pull, y)(y / y)
        >>> (grad,) = jax.jit(backward)(jax.jit(forward)(x, y), y, nothing)
        >>> bool(grad == y * jax.numpy.cos(x))
        True
    """
    pairs = list(zip(residuals_of(pull, operands), residuals, strict=True))
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
    saved = {id(x): y for x, y in pairs}
    return jax.tree.map(lambda x: saved.get(id(x), x), pull)


Policy = Literal[
    "none", "elementwise", "attention_and_mlp", "dots", "attention", "full"
]
Memory = Literal["device", "pinned_host"]
Keeps = Callable[..., Any]
"""A policy as `jax.checkpoint` takes it."""

mark = checkpoint_name
"""`mark(x, name)` is `x` under a name that policies can save."""

INPUT = "block_input"
"""The input of a block."""
MIDDLE = "block_middle"
"""The residual stream after attention, and after the feed-forward layer."""
PROJECTIONS = "projections"
"""Queries, keys and values as attention reads them."""
ATTENTION = attention.ATTENTION_OUTPUT
SPARSE = sparse.ATTENTION_OUTPUT
"""Outputs of sparse attention, and softmax sums."""
MLP = activation.INPUT
"""Outputs of the first matrices of a feed-forward layer."""
EXCHANGED = tokens.EXCHANGED
"""Results of the collectives between devices with different experts."""
ROUTED = tokens.ROUTED
"""Experts of all tokens: a few numbers per token, which take a sort."""

SAVED = {
    "elementwise": (
        INPUT,
        MIDDLE,
        PROJECTIONS,
        ATTENTION,
        SPARSE,
        MLP,
        EXCHANGED,
        ROUTED,
        norm.STATISTICS,
    ),
    "attention_and_mlp": (INPUT, ATTENTION, SPARSE, MLP, EXCHANGED, ROUTED),
    "dots": (INPUT, EXCHANGED, ROUTED),
    "attention": (INPUT, ATTENTION, SPARSE, EXCHANGED, ROUTED),
    "full": (INPUT,),
}
"""Names of the residuals that each policy saves; `none` has no names."""


def recompute(
    block: Callable[..., Any],
    policy: Policy,
    *,
    in_loop: bool,
    memory: Memory = "device",
) -> Callable[..., Any]:
    """Wraps a block so that it saves only the residuals of a policy.

    - `none` saves all residuals, unless the compiler recomputes some; at ZeRO stage 3,
      all residuals that are expensive to compute;
    - `elementwise` recomputes norms and activation functions;
    - `attention_and_mlp` also recomputes the projections;
    - `dots` saves products with weights and recomputes all else;
    - `attention` saves the input of the block and the outputs of attention;
    - `full` saves the input of the block and recomputes all else.

    All but `full` save what devices exchange for experts, and repeat no exchange.

    Under the last two policies, and with residuals in another memory, the backward pass
    computes all gradients of a block before it continues with the block before. The
    function then has no forward-mode derivative. `in_loop` means a loop of two
    iterations or more.
    """
    if policy == "none":
        return lambda params, *args: block(read_layer(params), *args)
    saved = keeps(policy, memory)

    def run(params: Params, *args: Any) -> Any:
        args = (read_layer(params), *args)
        if policy in ("attention", "full") or memory != "device":
            args = (*_in_backward_order(args[:2]), *args[2:])
        return block(*args)

    # In a loop the compiler cannot undo the recomputation by common subexpressions.
    return jax.checkpoint(run, policy=saved, prevent_cse=not in_loop)


@jax.custom_vjp
def _in_backward_order(inputs: Any) -> Any:
    """Returns the inputs unchanged, and makes the cotangents wait for each other.

    Otherwise the compiler defers the gradients of weights to overlap communication, and
    holds the operands of deferred products in all blocks until then.
    """
    return inputs


_in_backward_order.defvjp(
    lambda inputs: (inputs, None),
    lambda _, grads: (jax.lax.optimization_barrier(grads),),
)


def within_reach(memory: str) -> Memory:
    """Memory in which a single program stores residuals.

    Only blocks that run one by one store residuals on disks: `nvme` counts as `device`.
    """
    return "pinned_host" if memory == "pinned_host" else "device"


def keeps(policy: Policy, memory: Memory = "device") -> Keeps:
    """Makes the policy of `jax.checkpoint` for a named policy and a memory."""
    if policy == "none":
        return _is_expensive
    names = _save_names(SAVED[policy], memory)
    if policy == "dots":
        # Products with weights have no batch dims; attention scores have.
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint_policies.save_from_both_policies(names, dots)

    def is_saved(primitive: Any, *avals: Any, **params: Any) -> Any:
        # The kernel of cuDNN also saves its softmax sums, which have no name of ours.
        if primitive.name == "dot_product_attention_fwd_wrapper":
            return names(_naming(), *avals, name=ATTENTION)
        return names(primitive, *avals, **params)

    return is_saved


@functools.cache
def _naming() -> Any:
    """Primitive by which `checkpoint_name` names a value."""
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0).eqns
    return equation.primitive


def _save_names(names: tuple[str, ...], memory: Memory) -> Keeps:
    """Makes a policy that saves named residuals on the device or in another memory."""
    policies = jax.checkpoint_policies
    if memory == "device":
        return policies.save_only_these_names(*names, token_chunks.FROM_LOGITS)
    return policies.save_and_offload_only_these_names(
        # Read at once by the backward pass, so a copy to the host would only cost time.
        names_which_can_be_saved=[token_chunks.FROM_LOGITS],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=memory,
    )


def _is_expensive(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Whether a primitive costs more than reading the operands."""
    if primitive.name == "dot_general":
        # Products wider than their operands are scores inside a softmax.
        return params["preferred_element_type"] in (None, avals[0].dtype)
    return primitive.name not in CHEAP
