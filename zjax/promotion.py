"""JAX's standard dtype promotion for library code, whatever the program has set."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def dtype_promotion(kind: str = "standard") -> Iterator[None]:
    """Sets `jax_numpy_dtype_promotion` inside a block.

    Optax, and programs built on it, need the standard rules.

    Example:
        >>> with jax.numpy_dtype_promotion("strict"), dtype_promotion():
        ...     float(jax.numpy.int32(1) + jax.numpy.float32(0.5))
        1.5
    """
    # Entering the context needlessly would make compiled programs miss their caches.
    if jax.numpy_dtype_promotion.value == kind:
        yield
        return
    with jax.numpy_dtype_promotion(kind):
        yield
