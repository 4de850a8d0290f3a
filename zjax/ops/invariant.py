"""Arithmetic of float32 whose bits depend on the operands alone, not on the program.

A compiler fuses operations as it likes: it contracts a product and a sum into one
rounding, drops pairs of conversions to 16 bits, and computes a function in another way
at the end of an array. Here each product is rounded by itself, each rounding to 16 bits
is an operation, and sums have one order, whatever stands beside a number.

Reference: He et al., Defeating Nondeterminism in LLM Inference (2025).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from zjax_kernels import abstract
from zjax_kernels import invariant as kernels

_KEPT_BITS = 22
"""Bits of a product behind the leading one: a bit fewer than float32 has, as a rounding
to float32 is no operation. Products of bfloat16 numbers are exact."""
_SMALLEST_EXPONENT = -87.0
"""Number below which the exponential is 0: no result is subnormal."""


def product(
    x: Shaped[Array, "..."], y: Shaped[Array, "..."] | float
) -> Shaped[Array, "..."]:
    """Multiplies in float32, with a rounding that no compiler merges into a sum.

    The result has 23 significant bits.

    Example:
        >>> product(jnp.array([3.0]), 0.5).tolist()
        [1.5]
    """
    return fence(x.astype(jnp.float32) * jnp.asarray(y, jnp.float32))


def fence(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Rounds float32 to 23 significant bits, which no compiler merges into a sum."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_KEPT_BITS)


def round_to(x: Shaped[Array, "..."], dtype: Any) -> Shaped[Array, "..."]:
    """Rounds float32 numbers to a float dtype, though the compiler dislikes it.

    Example:
        >>> round_to(jnp.array([1.001]), jnp.bfloat16).tolist()
        [1.0]
    """
    if dtype == jnp.float32:
        return x
    limits = jnp.finfo(dtype)
    bits = {"exponent_bits": limits.nexp, "mantissa_bits": limits.nmant}
    return lax.reduce_precision(x, **bits).astype(dtype)


def add(x: Shaped[Array, "..."], y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Adds in float32, rounded to the dtype of `x`."""
    return round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def scale(x: Shaped[Array, "..."], factor: Any) -> Shaped[Array, "..."]:
    """Multiplies by a factor, rounded to the dtype of `x`."""
    return round_to(product(x, factor), x.dtype)


def total(x: Float[Array, "*S N"]) -> Float[Array, "*S"]:
    """Adds up the last dim by halves, in one order for each N.

    Example:
        >>> total(jnp.ones((2, 5))).tolist()
        [5.0, 5.0]
    """
    missing = (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)])
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def exp(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Computes the exponential of float32 numbers; below e^-87 it is 0.

    Example:
        >>> exp(jnp.array([0.0, -jnp.inf, jnp.inf])).tolist()
        [1.0, 0.0, inf]
    """
    # XLA for CPUs computes the last numbers of an array one by one, in another way.
    return lax.platform_dependent(x, cpu=_exp, default=lambda x: fence(jnp.exp(x)))


def log(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Computes the natural logarithm of float32 numbers that are above 1e-38.

    Example:
        >>> log(jnp.array([1.0])).tolist()
        [0.0]
    """
    return lax.platform_dependent(x, cpu=_log, default=lambda x: fence(jnp.log(x)))


def sigmoid(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Computes the logistic function of float32 numbers."""
    return 1.0 / (1.0 + exp(-x))


def tanh(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Computes the hyperbolic tangent of float32 numbers."""
    return fence(jnp.tanh(fence(x)))


def soft_cap(x: Shaped[Array, "..."], cap: float) -> Shaped[Array, "..."]:
    """Computes `cap * tanh(x / cap)`; a cap of 0 returns `x`."""
    return product(tanh(product(x, 1.0 / cap)), cap) if cap else x


def softmax(x: Float[Array, "*S N"]) -> Float[Array, "*S N"]:
    """Computes the softmax of float32 numbers over the last dim."""
    powers = exp(x - x.max(-1, keepdims=True))
    return powers / total(powers)[..., None]


def inverse_root(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Computes one over the root of float32 numbers."""
    # Between the two, or the compiler takes an approximation of both.
    return 1.0 / fence(jnp.sqrt(x))


def log_partition(scores: Float[Array, "*S V"]) -> Float[Array, "*S"]:
    """Computes `log sum_v exp(scores)` of float32 scores.

    Example:
        >>> log_partition(jnp.zeros((1, 1))).tolist()
        [0.0]
    """
    rows = scores.reshape(-1, scores.shape[-1])
    if kernels.has_log_partition(rows):
        run = with_gradient_of(_plain_log_partition, kernels.log_partition)
        return run(rows).reshape(scores.shape[:-1])
    largest = scores.max(-1)
    return log(total(exp(scores - largest[..., None]))) + largest


def _plain_log_partition(rows: Float[Array, "N V"]) -> Float[Array, " N"]:
    return jax.nn.logsumexp(rows, axis=-1)


def with_gradient_of(
    plain: Callable[..., Any], invariant: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes a function with the values of one and the gradient of another.

    Gradients need not be the same bits in all batches. Both functions take arrays with
    gradients, and a tuple of arrays without.
    """

    @jax.custom_vjp
    def call(arrays: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        return invariant(*arrays, *others)

    def forward(arrays: Any, others: Any) -> tuple[Any, Any]:
        return call(arrays, others), (arrays, others)

    def backward(saved: Any, cotangent: Any) -> tuple[Any, None]:
        arrays, others = saved
        _, pull = jax.vjp(lambda *arrays: plain(*arrays, *others), *arrays)
        return pull(cotangent), None

    call.defvjp(forward, backward)

    def run(*arrays: Any, others: tuple[Any, ...] = ()) -> Any:
        # A program that is counted shows what a layer costs, not how it is summed.
        if abstract.is_abstract():
            return plain(*arrays, *others)
        return call(arrays, others)

    return run


def _polynomial(x: jax.Array, factors: Sequence[float]) -> jax.Array:
    """Evaluates a polynomial, the highest power first."""
    first, *others = factors
    start = jnp.full_like(x, first)
    return functools.reduce(lambda y, each: product(y, x) + each, others, start)


_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""The logarithm of 2 in two terms; the first has few bits, for exact products."""
_EXP = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
"""The series of the exponential: |x| is below 0.35, and the next term below 6e-9."""
_ATANH = (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)
"""The series of the inverse hyperbolic tangent, in squares: x^2 is below 0.03."""


def _exp(x: jax.Array) -> jax.Array:
    """Computes the exponential by sums and products alone."""
    # Clipped, `x` is no product that the difference below could contract.
    clipped = jnp.clip(x, _SMALLEST_EXPONENT - 1, 89.0)
    power = jnp.round(product(clipped, 1.4426950408889634))
    rest = clipped - product(power, _LN2_HIGH) - product(power, _LN2_LOW)
    whole = jnp.where(x == x, power, 0).astype(jnp.int32)
    # 2^128 is too large for a float32 number: two factors.
    half = whole // 2
    y = _polynomial(rest, _EXP) * _power_of_two(half) * _power_of_two(whole - half)
    y = jnp.where(x < _SMALLEST_EXPONENT, 0.0, fence(y))
    return jnp.where(x == x, y, x)


def _power_of_two(power: jax.Array) -> jax.Array:
    """Returns 2 to a power of -126 to 127."""
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


def _log(x: jax.Array) -> jax.Array:
    """Computes the logarithm by sums, products and a quotient."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # From the root of a half to the root of 2: the logarithm of 1 is then 0.
    power = (bits - 0x3F3504F3) >> 23
    significand = lax.bitcast_convert_type(bits - (power << 23), jnp.float32)
    ratio = (significand - 1.0) / (significand + 1.0)
    rest = product(_polynomial(product(ratio, ratio), _ATANH), ratio)
    wide = power.astype(jnp.float32)
    y = (product(wide, _LN2_LOW) + rest) + product(wide, _LN2_HIGH)
    return jnp.where((x == x) & (x < jnp.inf), y, x)
