"""Operations on the registers of a warpgroup: products of matrices, and layouts."""

import dataclasses
from collections.abc import Callable
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

    def product(
        self, x: Any, y: Any, meanwhile: Callable[[], Any] = lambda: None
    ) -> tuple[jax.Array, Any]:
        """The product of two matrices in shared memory, and what is done meanwhile.

        Args:
            x: [m, d].
            y: [n, d].
            meanwhile: Runs while the tensor cores do.

        Returns:
            float32[m, n], and what `meanwhile` returned.
        """
        if self.simulated and not _NEWER:
            return _dot(x[...], y[...].T), meanwhile()

        def run(total):
            _start(total, x, y)
            beside = meanwhile()
            return total[...], beside

        return pl.run_scoped(run, _room(x, y))

    def products(
        self,
        pair: tuple[Any, Any],
        get_other: Callable[[], tuple[Any, Any]],
        use: Callable[[jax.Array], Any],
    ) -> tuple[Any, jax.Array]:
        """Two products, of which one is used while the other is under way.

        Args:
            pair: [m, d] and [n, d].
            get_other: Waits for the other pair.
            use: Of the first product.

        Returns:
            What `use` returned, and the other product.
        """
        if self.simulated and not _NEWER:
            found = use(_dot(pair[0][...], pair[1][...].T))
            other = get_other()
            return found, _dot(other[0][...], other[1][...].T)

        def run(first, second):
            _start(first, *pair)
            _start(second, *get_other())
            found = use(plgpu.wgmma_accumulator_load(first, wait_n=1))
            return found, second[...]

        return pl.run_scoped(run, _room(*pair), _room(*pair))

    def accumulate(
        self, *sums: tuple[jax.Array, jax.Array, Any]
    ) -> tuple[jax.Array, ...]:
        """Adds products to registers, all under way at once.

        Args:
            *sums: float32[m, n], [m, k] in registers, and [k, n] in shared memory.

        Returns:
            Each first plus the product of the others.
        """
        if self.simulated:
            found = [total + _dot(x.astype(y.dtype), y[...]) for total, x, y in sums]
            plgpu.commit_smem()  # tensor cores need no fence after a read
            return tuple(found)

        def run(refs):
            for ref, (_, x, y) in zip(refs, sums, strict=True):
                plgpu.wgmma(ref, x.astype(y.dtype), y)

        run_with: Any = pl.run_state(run)
        return run_with(tuple(ACC.init(total) for total, _, _ in sums))

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


def _room(x, y):
    return ACC((x.shape[0], y.shape[0]), jnp.float32)


def _start(total, x, y):
    plgpu.wgmma(total, x, y.transpose((1, 0)))


def _dot(x, y):
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32))
