"""Arrays that XLA must materialize instead of fusing into their users."""

import jax


@jax.custom_vjp
def materialize(x: jax.Array) -> jax.Array:
    """Stores an array in memory before anything reads it; its gradient is not affected.

    Without it XLA may fuse an addition into a matrix product that becomes slower, or
    copy the other operand of the addition first. Forward-mode differentiation is not
    defined.

    Example:
        >>> float(jax.grad(lambda x: 3.0 * materialize(x))(1.0))
        3.0
    """
    return jax.lax.optimization_barrier(x)


materialize.defvjp(
    lambda x: (jax.lax.optimization_barrier(x), None), lambda _, grad: (grad,)
)


@jax.custom_vjp
def materialize_gradient(x: jax.Array) -> jax.Array:
    """Stores the gradient of an array in memory before anything reads it.

    Without it XLA may recompute an expensive gradient for each reader. Forward-mode
    differentiation is not defined.

    Example:
        >>> float(jax.grad(lambda x: 3.0 * materialize_gradient(x))(1.0))
        3.0
    """
    return x


materialize_gradient.defvjp(
    lambda x: (x, None), lambda _, grad: (jax.lax.optimization_barrier(grad),)
)
