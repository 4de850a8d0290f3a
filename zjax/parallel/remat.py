"""Rematerialisation policies: which residuals are saved, and which are recomputed.

In units of tokens times width, a pre-norm block with a feed-forward layer four times as
wide saves 10 units under `elementwise`, its input among them.

Reference: Chen et al., sublinear memory cost (arXiv:1604.06174).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from zjax.comm import tokens
from zjax.jaxprs.primitives import CHEAP
from zjax.ops import activation, attention, cross_entropy, sparse
from zjax.sharding.layers import read_layer
from zjax.typing import Params
from zjax_kernels import norm

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
"""The stream after attention, and after the feed-forward layer."""
PROJECTIONS = "projections"
"""Queries, keys and values as attention reads them."""
ATTENTION = attention.ATTENTION_OUTPUT
SPARSE = sparse.ATTENTION_OUTPUT
"""Outputs of sparse attention, and its softmax sums."""
MLP = activation.INPUT
"""Outputs of the first matrices of a feed-forward layer."""
EXCHANGED = tokens.EXCHANGED
"""Results of the collectives between devices with different experts."""
ROUTED = tokens.ROUTED
"""Experts of all tokens: a few numbers for each, which take a sort."""

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

    - `none` saves all residuals, as far as the compiler does not recompute them; at
      ZeRO stage 3, those that are expensive to compute;
    - `elementwise` recomputes norms and activation functions;
    - `attention_and_mlp` also recomputes the projections;
    - `dots` saves products with weights and recomputes all else;
    - `attention` saves the input of the block and the outputs of attention;
    - `full` saves the input of the block and recomputes all else.

    All but `full` save what devices exchange for experts, and repeat no exchange.

    Under the last two policies, and with residuals in another memory, the backward pass
    computes all gradients of a block before it continues with the block before. The
    function then has no forward-mode derivative.

    Args:
        block: Pure function of parameters, stream and other arrays, in this order.
            The result also takes parameters for `read_layer`.
        policy: One of the names above.
        in_loop: Whether the block runs in a loop of two iterations or more. The
            compiler then cannot undo the recomputation by common subexpressions.
        memory: Memory for the saved residuals.

    Returns:
        A function with the same values and gradients.

    Example:
        >>> square = recompute(lambda x: x * x, "full", in_loop=False)
        >>> float(jax.grad(square)(3.0))
        6.0
    """
    if policy == "none":
        return lambda params, *args: block(read_layer(params), *args)
    saved = keeps(policy, memory)

    def run(params: Params, *args: Any) -> Any:
        args = (read_layer(params), *args)
        if policy in ("attention", "full") or memory != "device":
            args = (*_in_backward_order(args[:2]), *args[2:])
        return block(*args)

    return jax.checkpoint(run, policy=saved, prevent_cse=not in_loop)


@jax.custom_vjp
def _in_backward_order(inputs: Any) -> Any:
    """The same values; the cotangents wait for each other.

    Otherwise the compiler defers the gradients of weights to overlap communication, and
    holds their operands in all blocks until then.
    """
    return inputs


_in_backward_order.defvjp(
    lambda inputs: (inputs, None),
    lambda _, grads: (jax.lax.optimization_barrier(grads),),
)


def within_reach(memory: str) -> Memory:
    """The memory in which a single program stores residuals.

    Args:
        memory: `model.activation_memory`. Disks are left to blocks that run one by one,
            and count as `device` here.

    Example:
        >>> within_reach("nvme")
        'device'
    """
    return "pinned_host" if memory == "pinned_host" else "device"


def keeps(policy: Policy, memory: Memory = "device") -> Keeps:
    """A policy of `jax.checkpoint`.

    Args:
        policy: A name of `recompute`; `none` saves what is expensive to compute.
        memory: Memory for the saved residuals.

    Example:
        >>> keeps("none")(jax.lax.conv_general_dilated_p)
        True
    """
    if policy == "none":
        return _is_expensive
    names = _save_names(SAVED[policy], memory)
    if policy == "dots":
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
    """The primitive that gives a value its name."""
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0).eqns
    return equation.primitive


def _save_names(names: tuple[str, ...], memory: Memory) -> Keeps:
    policies = jax.checkpoint_policies
    if memory == "device":
        return policies.save_only_these_names(*names, cross_entropy.GRADIENTS)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[cross_entropy.GRADIENTS],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=memory,
    )


def _is_expensive(primitive: Any, *avals: Any, **params: Any) -> bool:
    if primitive.name == "dot_general":
        # Products wider than their operands are scores inside a softmax.
        return params["preferred_element_type"] in (None, avals[0].dtype)
    return primitive.name not in CHEAP
