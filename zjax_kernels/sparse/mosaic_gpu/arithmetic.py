"""Operations on the registers of a warpgroup: products of matrices, and layouts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_NEWER = hasattr(plgpu, "InterpretGPUParams")


def index(x: Any) -> jax.Array:
    """A 32-bit number, whatever the default is.

    Args:
        x: A number.

    Returns:
        int32[].
    """
    return jnp.asarray(x, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Operations on registers, for GPUs or as the interpreter can simulate them.

    Args:
        simulated: Whether the interpreter runs the kernel.
    """

    simulated: bool

    def lay(self, x: jax.Array, layout: Any) -> jax.Array:
        """Spreads registers over the lanes of a warpgroup.

        Args:
            x: An array.
            layout: Of the result.

        Returns:
            `x`.
        """
        return x if self.simulated else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        """One number everywhere.

        Args:
            shape: Of the result.
            value: The number.
            layout: Of the result.

        Returns:
            float32[shape].
        """
        return self.lay(jnp.full(shape, value, jnp.float32), layout)

    def load(self, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
        """Reads a vector.

        Args:
            ref: Where it is.
            layout: Of the result.
            optimized: Whether it is in shared memory.

        Returns:
            What is there.
        """
        if self.simulated:
            return ref[...]
        where = () if _NEWER else ((),)
        return plgpu.load(ref, *where, layout=layout, optimized=optimized)

    def products(self, pairs: Sequence[tuple[Any, Any]]) -> list[jax.Array]:
        """Products of matrices in shared memory, all under way at once.

        Args:
            pairs: Rows of scores and columns of scores, [m, d] and [n, d].

        Returns:
            float32[m, n] for each pair.
        """
        if self.simulated and not _NEWER:
            return [
                jnp.dot(x[...].astype(jnp.float32), y[...].astype(jnp.float32).T)
                for x, y in pairs
            ]

        def run(*sums):
            for total, (x, y) in zip(sums, pairs, strict=True):
                plgpu.wgmma(total, x, y.transpose((1, 0)))
            return [total[...] for total in sums]

        shapes = [(x.shape[0], y.shape[0]) for x, y in pairs]
        sums = [ACC(shape, jnp.float32) for shape in shapes]
        return pl.run_scoped(run, *sums)

    def accumulate(self, total: jax.Array, x: jax.Array, y: Any) -> jax.Array:
        """Adds a product to registers.

        Args:
            total: float32[m, n].
            x: [m, k] in registers.
            y: [k, n] in shared memory.

        Returns:
            `total + x y`.
        """
        x = x.astype(y.dtype)
        if self.simulated:
            total += jnp.dot(x.astype(jnp.float32), y[...].astype(jnp.float32))
            plgpu.commit_smem()  # tensor cores need no fence after a read
            return total
        run: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, x, y))
        return run(ACC.init(total))

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Numbers along an axis.

        Args:
            shape: Of the result.
            axis: 0 or 1.

        Returns:
            int32[shape].
        """
        if self.simulated:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        layout = plgpu.Layout.WGMMA
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def spread(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A number everywhere in a tile.

        Args:
            x: A number.
            shape: Of the result.

        Returns:
            The tile.
        """
        return self.lay(jnp.broadcast_to(x, shape), plgpu.Layout.WGMMA)
