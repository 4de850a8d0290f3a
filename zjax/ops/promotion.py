"""How dtypes that differ are combined: as a user asks in the user's code alone."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def promoting(kind: str = "standard") -> Iterator[None]:
    """Combines dtypes by other rules than those set for the program.

    Optax, and programs built on it, need the standard ones.

    Args:
        kind: A value of `jax_numpy_dtype_promotion`.

    Example:
        >>> with jax.numpy_dtype_promotion("strict"), promoting():
        ...     float(jax.numpy.int32(1) + jax.numpy.float32(0.5))
        1.5
    """
    # Entering a context anew would make compiled programs miss their caches.
    if jax.numpy_dtype_promotion.value == kind:
        yield
        return
    with jax.numpy_dtype_promotion(kind):
        yield
