"""Matrix products in float32 by units that multiply bfloat16.

A float32 number is the sum of three bfloat16 numbers, and bfloat16 products are exact
in float32: Henry et al., arXiv:1904.06376.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_NUM_TERMS = 3
"""Three significands of 8 bits hold the 24 of a float32 number."""


@jax.custom_vjp
def split_dot(
    x: Float[Array, "T M"], kernel: Float[Array, "M N"]
) -> Float[Array, "T N"]:
    """Multiplies bfloat16 rows by a float32 or bfloat16 matrix, in float32.

    Args:
        x: bfloat16[T, M].
        kernel: float32[M, N] or bfloat16[M, N], narrow: its terms are multiplied side
            by side.

    Returns:
        float32[T, N]. The gradient of the kernel is as exact; that of `x` has the 16
        bits of its dtype.

    Example:
        >>> x, kernel = jnp.ones((1, 2), jnp.bfloat16), jnp.array([[1.0], [2.0**-20]])
        >>> float(split_dot(x, kernel)[0, 0] - 1) == 2**-20
        True
    """
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    terms = jnp.concatenate(_terms(kernel), 1)
    products = jnp.dot(x, terms, preferred_element_type=jnp.float32)
    return _sum_columns(products, kernel.shape[1]), (x, kernel)


def _backward(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    terms, columns = _terms(cotangent), _terms(kernel)
    products = jax.lax.dot_general(
        x,
        jnp.concatenate(terms, 1),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    # Products of small terms are below the last bit of bfloat16.
    pairs = [(term, columns[0]) for term in terms[:2]]
    pairs += [(terms[0], column) for column in columns[1:2]]
    left, right = (jnp.concatenate(side, 1) for side in zip(*pairs, strict=True))
    x_cotangent = jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    kernel_cotangent = _sum_columns(products, kernel.shape[1])
    return x_cotangent.astype(x.dtype), kernel_cotangent.astype(kernel.dtype)


split_dot.defvjp(_forward, _backward)


def _terms(x: jax.Array) -> list[jax.Array]:
    """bfloat16 arrays that add up to `x`, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    terms = []
    for _ in range(_NUM_TERMS):
        # A compiler may drop a pair of dtype conversions, but not this.
        term = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return terms


def _sum_columns(products: jax.Array, num_columns: int) -> jax.Array:
    """Adds blocks of columns, those of the smallest terms first."""
    blocks = jnp.split(products, products.shape[1] // num_columns, axis=1)
    return sum(blocks[-2::-1], start=blocks[-1])
