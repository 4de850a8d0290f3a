"""Layers whose values for a token do not depend on the tokens beside it.

Products sum in blocks of fixed depth, one after another, for any number of rows and of
columns: matrices side by side give the bits of the matrices apart. Gradients are those
of the usual layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.ops import activation, invariant, rotary
from zjax.ops.invariant import product, round_to, total
from zjax_kernels import invariant as kernels
from zjax_kernels import norm
from zjax_kernels.grouped.reference import LIMIT, SLOPE

_DEPTH = 16
"""Inputs of a block of a product, which are added by halves."""


def dot(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    num_contracted: int = 1,
    *,
    alone: bool = True,
) -> Float[Array, "..."]:
    """Contracts the last dims of `x` with the first of `kernel`, like `jnp.tensordot`.

    Sums are float32, rounded to the dtype of `x` at the end. The GPU kernel runs where
    it can, which depends on the device, the dtype and `kernel` only, unless `alone` is
    false: `jax.vmap` then multiplies by several matrices.

    Example:
        >>> dot(jnp.ones((2, 3)), jnp.ones((3, 1))).tolist()
        [[3.0], [3.0]]
    """
    before, after = x.shape[: x.ndim - num_contracted], kernel.shape[num_contracted:]
    depth = math.prod(kernel.shape[:num_contracted])
    rows, matrix = x.reshape(-1, depth), kernel.reshape(depth, -1)
    has_kernel = alone and kernels.has_matmul(rows, matrix)
    multiply = kernels.matmul if has_kernel else _dot
    y = invariant.with_gradient_of(jnp.dot, multiply)(rows, matrix)
    return y.reshape(*before, *after)


def logits(
    hidden: Float[Array, "... M"], head: Float[Array, "V M"]
) -> Float[Array, "... V"]:
    """Multiplies states by the rows of a head, in float32.

    Example:
        >>> logits(jnp.ones((1, 2)), jnp.ones((3, 2))).tolist()
        [[2.0, 2.0, 2.0]]
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    has_kernel = kernels.has_matmul(rows, head, transpose=True)
    multiply = _logits_of_kernel if has_kernel else _logits_in_order
    y = invariant.with_gradient_of(_plain_logits, multiply)(rows, head)
    return y.reshape(*hidden.shape[:-1], -1)


def _plain_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)


def _logits_of_kernel(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return kernels.matmul(hidden, head, transpose=True, dtype=jnp.float32)


def _logits_in_order(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return sum_products(hidden, head.T)


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies rows by a matrix, in the dtype of the rows."""
    return round_to(sum_products(x, kernel), x.dtype)


def sum_products(
    x: Float[Array, "N K"], kernel: Float[Array, "K M"]
) -> Float[Array, "N M"]:
    """Sums products in float32: blocks of inputs in turn, each by halves."""
    padding = (0, -x.shape[1] % _DEPTH)
    blocks = jnp.pad(x, [(0, 0), padding]).reshape(len(x), -1, _DEPTH)
    matrices = jnp.pad(kernel, [padding, (0, 0)]).reshape(-1, _DEPTH, kernel.shape[1])

    def add_block(sums: jax.Array, block: Any) -> tuple[jax.Array, None]:
        rows, matrix = block
        parts = [product(rows[:, i, None], matrix[i][None]) for i in range(_DEPTH)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [left + right for left, right in pairs]
        return sums + parts[0], None

    zeros = jnp.zeros((len(x), kernel.shape[1]), jnp.float32)
    inputs = jnp.swapaxes(blocks, 0, 1), matrices
    return jax.lax.scan(add_block, zeros, inputs)[0]


def normalize(
    x: Float[Array, "... C"],
    scale: Float[Array, " C"],
    bias: Float[Array, " C"] | None,
    *,
    eps: float,
    centre: bool,
) -> Float[Array, "... C"]:
    """Computes the layer norm with `centre`, else the RMS norm without a bias.

    Example:
        >>> x = jnp.array([[3.0, 3.0]])
        >>> normalize(x, jnp.ones(2), None, eps=1e-5, centre=False).round(3).tolist()
        [[1.0, 1.0]]
    """

    def run_norm(name: str, x: jax.Array, scale: jax.Array, bias: Any) -> jax.Array:
        how = {"eps": eps, "implementation": name}
        if centre:
            return norm.layer_norm(x, scale, bias, **how)
        return norm.rms_norm(x, scale, **how)

    plain = functools.partial(run_norm, "reference")

    def compute(x: jax.Array, scale: jax.Array, bias: Any) -> jax.Array:
        wide, share = x.astype(jnp.float32), 1.0 / x.shape[-1]
        if centre:
            wide -= product(total(wide), share)[..., None]
        variance = product(total(product(wide, wide)), share)
        factor = invariant.inverse_root(variance + eps)[..., None]
        shape = (1,) * (x.ndim - 1) + scale.shape
        wide = product(product(wide, factor), scale.reshape(shape))
        if bias is not None:
            wide += bias.astype(jnp.float32).reshape(shape)
        return round_to(wide, x.dtype)

    run_kernel = functools.partial(run_norm, "mosaic_gpu")
    chosen = run_kernel if kernels.has_norm(x) else compute
    return invariant.with_gradient_of(plain, chosen)(x, scale, bias)


def rotate(
    x: Float[Array, "B L H D"],
    cos: Float[Array, "#B L half"],
    sin: Float[Array, "#B L half"],
    pairs: rotary.Pairs = "halves",
) -> Float[Array, "B L H D"]:
    """Rotates channel pairs as `zjax.ops.rotary.rotate` does.

    Example:
        >>> x, zero = jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1))
        >>> rotate(x, zero, zero + 1.0).ravel().tolist()
        [-1.0, 1.0]
    """

    def compute(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        how = {"multiply": product, "round_to": round_to}
        return rotary.rotate(x, cos, sin, pairs, **how)

    def plain(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return rotary.rotate(x, cos, sin, pairs)

    return invariant.with_gradient_of(plain, compute)(x, cos, sin)


def activate(name: str, *inputs: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Applies an activation of `zjax.ops.activation`: gate and value, or one input.

    Example:
        >>> activate("swiglu", jnp.zeros(1), jnp.ones(1)).tolist()
        [0.0]
    """
    plain = (activation.UNGATED | activation.GATED)[name]

    def compute(*inputs: jax.Array) -> jax.Array:
        wide = [x.astype(jnp.float32) for x in inputs]
        return round_to(_ACTIVATIONS[name](*wide), inputs[0].dtype)

    return invariant.with_gradient_of(plain, compute)(*inputs)


def _gelu(x: jax.Array) -> jax.Array:
    """Computes GELU by tanh."""
    cube = product(product(product(x, x), x), 0.044715)
    share = 1.0 + invariant.tanh(product(x + cube, math.sqrt(2 / math.pi)))
    return product(product(x, 0.5), share)


def _gelu_exact(x: jax.Array) -> jax.Array:
    """Computes GELU by the error function."""
    share = invariant.fence(jax.lax.erf(product(x, math.sqrt(0.5))))
    return product(product(x, 0.5), 1.0 + share)


def _silu(x: jax.Array) -> jax.Array:
    return product(x, invariant.sigmoid(x))


def _gated(activate: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Makes the activation of a gate that multiplies a value."""
    return lambda gate, value: product(activate(gate), value)


def _clamped_swiglu(gate: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the activation of gpt-oss."""
    gate, value = jnp.minimum(gate, LIMIT), jnp.clip(value, -LIMIT, LIMIT)
    share = invariant.sigmoid(product(gate, SLOPE))
    return product(product(gate, share), value + 1.0)


_ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "swiglu": _gated(_silu),
    "geglu": _gated(_gelu),
    "clamped_swiglu": _clamped_swiglu,
}
