"""Activations of feed-forward layers, recomputed in the backward pass; soft caps."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax_kernels.grouped import reference


def soft_cap(x: Float[Array, "*dims"], cap: float) -> Float[Array, "*dims"]:
    """Computes `cap * tanh(x / cap)`; a cap of 0 returns `x`.

    Example:
        >>> soft_cap(jnp.array([1e6]), 30.0).tolist()
        [30.0]
    """
    return cap * jnp.tanh(x / cap) if cap else x


INPUT = "mlp"
"""Name, for policies of `jax.checkpoint`, of the inputs of activation functions."""


# Recomputed, so that only inputs are saved: intermediates would be several arrays more.
@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Computes GELU with tanh, as GPT-2 and the original BERT do.

    Reference:
        Hendrycks and Gimpel (arXiv:1606.08415).
    """
    return jax.nn.gelu(x, approximate=True)


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_exact(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Computes GELU with the error function, as BERT in PyTorch does.

    Example:
        >>> gelu_exact(jax.numpy.array([-20.0, 0.0, 20.0])).tolist()
        [-0.0, 0.0, 20.0]
    """
    return jax.nn.gelu(x, approximate=False)


@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Computes `silu(gate) * up`, the gated activation of Llama.

    Reference:
        Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202).
    """
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def geglu(
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Computes `gelu(gate) * up` with tanh, the gated activation of Gemma.

    Example:
        >>> geglu(jax.numpy.array([0.0, 20.0]), jax.numpy.array([5.0, 2.0])).tolist()
        [0.0, 40.0]

    Reference:
        Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202).
    """
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def clamped_swiglu(
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Computes the gated activation of gpt-oss, with clamped inputs.

    Example:
        >>> x = jax.numpy.array([0.0, 9.0])
        >>> clamped_swiglu(x, jax.numpy.ones(2)).round(2).tolist()
        [0.0, 14.0]

    Reference:
        gpt-oss (arXiv:2508.10925), section 2.
    """
    return reference.clamped_swiglu(gate, up)


UNGATED = {"gelu": gelu, "gelu_exact": gelu_exact}
GATED = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu}
