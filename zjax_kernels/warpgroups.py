"""Loads into registers, and the warpgroups of a kernel: two compute, one copies."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_INDEX = inspect.signature(plgpu.load).parameters["idx"]
"""`idx` of `plgpu.load`: required before JAX 0.11, absent afterwards."""


def load(ref: Any, layout: Any, *, interpret: Any, optimized: bool = True) -> jax.Array:
    """Reads an array inside a kernel; the interpreter ignores `layout`.

    `interpret` holds the interpreter's parameters, None on a GPU. `optimized` makes a
    load without a fast implementation an error of compilation.
    """
    if interpret is not None:
        return ref[...]
    index = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
    return plgpu.load(ref, layout=layout, optimized=optimized, **index)


NUM_COMPUTE = 2
"""Warpgroups that compute; one more copies."""
AXIS = "warpgroup"
"""Name of the warpgroups' axis."""


def specialize_warpgroups(
    compute: Callable[[], None], copy: Callable[[], None]
) -> None:
    """Runs `compute` on two warpgroups, and `copy` with few registers on the third."""
    warpgroup = lax.axis_index(AXIS)

    # An SM has 65,536 registers, 512 for each lane of a warpgroup: 2 * 240 + 24 = 504.
    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()
