"""Loads into registers, under the signature of the installed JAX."""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_INDEX = inspect.signature(plgpu.load).parameters["idx"]
"""Required before JAX 0.11, absent afterwards."""


def load(ref: Any, layout: Any, *, interpret: Any, optimized: bool = True) -> jax.Array:
    """Reads an array inside a kernel; the interpreter ignores `layout`.

    `interpret` holds the interpreter's parameters, None on a GPU.
    """
    if interpret is not None:
        return ref[...]
    index = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
    return plgpu.load(ref, layout=layout, optimized=optimized, **index)
