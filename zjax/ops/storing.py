"""What is to be stored in memory between two kernels, and not be fused away."""

import jax


@jax.custom_vjp
def store(x: jax.Array) -> jax.Array:
    """Has an array stored by what makes it, and read by what uses it.

    Without it the compiler may fuse a sum into a product of matrices that is slower for
    it, or copy the other summand first.

    Args:
        x: Any array.

    Returns:
        The same array; its gradient passes freely. Forward-mode differentiation is not
        defined.

    Example:
        >>> float(jax.grad(lambda x: 3.0 * store(x))(1.0))
        3.0
    """
    return jax.lax.optimization_barrier(x)


store.defvjp(lambda x: (jax.lax.optimization_barrier(x), None), lambda _, grad: (grad,))


@jax.custom_vjp
def store_gradient(x: jax.Array) -> jax.Array:
    """Has the gradient of an array stored before anything reads it.

    Without it the compiler may compute an expensive gradient again for each reader.

    Args:
        x: Any array.

    Returns:
        The same array. Forward-mode differentiation is not defined.

    Example:
        >>> float(jax.grad(lambda x: 3.0 * store_gradient(x))(1.0))
        3.0
    """
    return x


store_gradient.defvjp(
    lambda x: (x, None), lambda _, grad: (jax.lax.optimization_barrier(grad),)
)
