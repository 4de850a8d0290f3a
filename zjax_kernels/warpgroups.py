"""Two warpgroups that compute, and a third that copies their inputs ahead of them."""

from collections.abc import Callable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_COMPUTE = 2
AXIS = "warpgroup"


def specialize_warpgroups(
    compute: Callable[[], None], copy: Callable[[], None]
) -> None:
    """Runs `compute` on two warpgroups, `copy` on the third, with few registers."""
    warpgroup = lax.axis_index(AXIS)

    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()
