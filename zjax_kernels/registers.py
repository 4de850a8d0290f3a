"""Arrays from memory into registers, by the names that this JAX has for it."""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_INDEX = inspect.signature(plgpu.load).parameters["idx"]
"""It must be given before JAX 0.11, and not after."""


def load(ref: Any, layout: Any, *, interpret: Any, optimized: bool = True) -> jax.Array:
    """Reads an array, in a kernel.

    Args:
        ref: In shared memory or in that of the GPU.
        layout: Which thread has which elements.
        interpret: Parameters of the interpreter, which knows no layouts; none on a GPU.
        optimized: As of `plgpu.load`.

    Returns:
        The array.
    """
    if interpret is not None:
        return ref[...]
    index = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
    return plgpu.load(ref, layout=layout, optimized=optimized, **index)
