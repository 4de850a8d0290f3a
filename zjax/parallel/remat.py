"""What the backward pass keeps and what it computes again, by name.

Tokens times width is the unit: a pre-norm block with a feed-forward four times as wide
keeps about 30 units for its backward pass, its input being one of them. The policies
keep fewer, for more arithmetic.

Reference: Chen et al., sublinear memory cost (arXiv:1604.06174).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Policy = Literal["none", "full", "dots", "attention_and_mlp"]

ATTENTION = "attention"
"""Name of the averages that attention returns, before the output projection."""
MLP = "mlp"
"""Name of the outputs of the first matrices of a feed-forward layer."""


def name_attention(x: jax.Array) -> jax.Array:
    """Marks what attention returned, for the policies to find.

    Args:
        x: Averages of all heads.

    Returns:
        The same array.

    Example:
        >>> float(name_attention(jax.numpy.ones(())))
        1.0
    """
    return checkpoint_name(x, ATTENTION)


def name_mlp(x: jax.Array) -> jax.Array:
    """Marks what enters the activation of a feed-forward layer.

    Args:
        x: Output of a first matrix.

    Returns:
        The same array.

    Example:
        >>> float(name_mlp(jax.numpy.ones(())))
        1.0
    """
    return checkpoint_name(x, MLP)


def recompute(
    block: Callable[..., Any], policy: Policy, *, in_loop: bool
) -> Callable[..., Any]:
    """Wraps a block so that its backward pass keeps only what the policy names.

    Besides the input of the block,

    - `none` keeps everything;
    - `dots` keeps the results of the weight matrices and computes attention, norms and
      activations again;
    - `attention_and_mlp` keeps what attention returned and what enters the activation,
      and computes projections, norms and activations again;
    - `full` keeps nothing and computes the block again.

    Args:
        block: Pure function of arrays.
        policy: One of the names above.
        in_loop: Whether the block runs inside a loop of more than one turn, where the
            compiler cannot undo the recomputation and need not be kept from it.

    Returns:
        A function of the same values and gradients.

    Example:
        >>> square = recompute(lambda x: x * x, "full", in_loop=False)
        >>> float(jax.grad(square)(3.0))
        6.0
    """
    if policy == "none":
        return block
    return jax.checkpoint(block, policy=_POLICIES[policy], prevent_cse=not in_loop)


_keep_names = jax.checkpoint_policies.save_only_these_names(ATTENTION, MLP)


def _keep_attention_and_mlp(primitive, *args, **params):
    # cuDNN's kernel keeps its softmax sums too; its outputs have no name of ours.
    if primitive.name == "dot_product_attention_fwd_wrapper":
        return True
    return _keep_names(primitive, *args, **params)


_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention_and_mlp": _keep_attention_and_mlp,
}
