"""What the backward pass keeps and what it computes again, by name.

Tokens times width is the unit: of a pre-norm block with a feed-forward four times as
wide, `elementwise` keeps 10 units for the backward pass, its input being one of them.

Reference: Chen et al., sublinear memory cost (arXiv:1604.06174).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from zjax.jaxprs.primitives import CHEAP
from zjax.ops import attention, cross_entropy, sparse
from zjax_kernels import norm

Policy = Literal[
    "none", "elementwise", "attention_and_mlp", "dots", "attention", "full"
]
Memory = Literal["device", "pinned_host"]
Keeps = Callable[..., Any]
"""A policy as `jax.checkpoint` takes it."""

mark = checkpoint_name
"""`mark(x, name)` is `x`, for the policies to find."""

INPUT = "block_input"
"""What enters a block."""
MIDDLE = "block_middle"
"""The stream after each half of a block has added to it."""
PROJECTIONS = "projections"
"""Queries, keys and values as attention reads them."""
ATTENTION = attention.ATTENTION_OUTPUT
SPARSE = sparse.ATTENTION_OUTPUT
"""What sparse attention returns, with the sums of its softmax."""
MLP = "mlp"
"""Outputs of the first matrices of a feed-forward layer."""

KEPT = {
    "elementwise": (
        INPUT,
        MIDDLE,
        PROJECTIONS,
        ATTENTION,
        SPARSE,
        MLP,
        norm.STATISTICS,
    ),
    "attention_and_mlp": (INPUT, ATTENTION, SPARSE, MLP),
    "dots": (INPUT,),
    "attention": (INPUT, ATTENTION, SPARSE),
    "full": (INPUT,),
}
"""The names that each policy keeps; `none` names nothing."""


def recompute(
    block: Callable[..., Any],
    policy: Policy,
    *,
    in_loop: bool,
    memory: Memory = "device",
) -> Callable[..., Any]:
    """Wraps a block so that its backward pass keeps only what the policy names.

    - `none` keeps everything, or what the compiler would rather not compute again; at
      ZeRO stage 3, what is dear to compute;
    - `elementwise` computes norms and activation functions again;
    - `attention_and_mlp` also computes the projections again;
    - `dots` keeps what multiplications by weights return and computes the rest again;
    - `attention` keeps the input of the block and what attention returns;
    - `full` keeps the input of the block and computes all of it again.

    Under the last two, and where what is kept rests elsewhere, all gradients of a block
    come before those of the block before it; the function then has no forward mode.

    Args:
        block: Pure function of arrays, parameters and the stream first.
        policy: One of the names above.
        in_loop: Whether the block runs inside a loop of more than one turn, where the
            compiler cannot undo the recomputation and need not be kept from it.
        memory: Where what the policy names rests until the backward pass.

    Returns:
        A function of the same values and gradients.

    Example:
        >>> square = recompute(lambda x: x * x, "full", in_loop=False)
        >>> float(jax.grad(square)(3.0))
        6.0
    """
    if policy == "none":
        return block
    kept = keeps(policy, memory)

    def run(*args: Any) -> Any:
        if policy in ("attention", "full") or memory != "device":
            args = (*_one_after_another(args[:2]), *args[2:])
        return block(*args)

    return jax.checkpoint(run, policy=kept, prevent_cse=not in_loop)


@jax.custom_vjp
def _one_after_another(inputs: Any) -> Any:
    """Makes the block before wait for all gradients of this one.

    The compiler would rather compute gradients of weights later, under communication,
    and keep what they are made of in all blocks until then.
    """
    return inputs


_one_after_another.defvjp(
    lambda inputs: (inputs, None),
    lambda _, grads: (jax.lax.optimization_barrier(grads),),
)


def within_reach(memory: str) -> Memory:
    """Where one program keeps what is asked to rest in a memory.

    Args:
        memory: `model.activation_memory`.

    Returns:
        The same, but for disks: only blocks that run one by one hand over what enters
        them.

    Example:
        >>> within_reach("nvme")
        'device'
    """
    return "pinned_host" if memory == "pinned_host" else "device"


def keeps(policy: Policy, memory: Memory = "device") -> Keeps:
    """What is kept, as `jax.checkpoint` asks for it.

    Args:
        policy: A name of `recompute`; `none` keeps what is dear to compute.
        memory: Where what the policy names rests.

    Returns:
        A function of a primitive and its parameters: whether, or where to.

    Example:
        >>> keeps("none")(jax.lax.conv_general_dilated_p)
        True
    """
    if policy == "none":
        return _is_dear
    names = _keep_names(KEPT[policy], memory)
    if policy == "dots":
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint_policies.save_from_both_policies(names, dots)

    def is_kept(primitive: Any, *avals: Any, **params: Any) -> Any:
        # cuDNN's kernel keeps its softmax sums too; its outputs have no name of ours.
        if primitive.name == "dot_product_attention_fwd_wrapper":
            return names(_naming(), *avals, name=ATTENTION)
        return names(primitive, *avals, **params)

    return is_kept


@functools.cache
def _naming() -> Any:
    """The primitive that gives a value its name."""
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0).eqns
    return equation.primitive


def _keep_names(names: tuple[str, ...], memory: Memory) -> Keeps:
    policies = jax.checkpoint_policies
    if memory == "device":
        return policies.save_only_these_names(*names, cross_entropy.GRADIENTS)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[cross_entropy.GRADIENTS],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=memory,
    )


def _is_dear(primitive: Any, *avals: Any, **params: Any) -> bool:
    if primitive.name == "dot_general":
        # Sums wider than their operands are the inside of a softmax.
        return params["preferred_element_type"] in (None, avals[0].dtype)
    return primitive.name not in CHEAP
