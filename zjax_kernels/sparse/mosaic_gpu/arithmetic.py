"""Operations on the registers of a warpgroup, for GPUs and for the interpreter."""

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
    """An int32 scalar, whatever JAX's default integer is."""
    return jnp.asarray(x, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Operations on registers, for GPUs or as the interpreter can simulate them.

    Args:
        simulated: Whether the interpreter runs the kernel.
    """

    simulated: bool

    def layout_cast(self, x: jax.Array, layout: Any) -> jax.Array:
        """Distributes `x` over the lanes of a warpgroup."""
        return x if self.simulated else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        """float32[shape], filled with `value`."""
        return self.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def load(self, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
        """Reads a vector from shared memory; from global if not `optimized`."""
        if self.simulated:
            return ref[...]
        where = () if _NEWER else ((),)
        return plgpu.load(ref, *where, layout=layout, optimized=optimized)

    def product(
        self, x: Any, y: Any, meanwhile: Callable[[], Any] = lambda: None
    ) -> tuple[jax.Array, Any]:
        """Product of [m, d] and [n, d] transposed, in shared memory: float32[m, n].

        `meanwhile` runs while the tensor cores do; its result is returned, too.
        """
        if self.simulated and not _NEWER:
            return _dot(x[...], y[...].T), meanwhile()

        def run(total):
            _start_product(total, x, y)
            result = meanwhile()
            return total[...], result

        return pl.run_scoped(run, _accumulator(x, y))

    def overlapped_products(
        self,
        pair: tuple[Any, Any],
        get_other: Callable[[], tuple[Any, Any]],
        use: Callable[[jax.Array], Any],
    ) -> tuple[Any, jax.Array]:
        """Computes two products; `use` runs on the first while the second is under way.

        `pair` is [m, d] and [n, d] in shared memory; `get_other` waits for the second
        pair. Returns the result of `use`, and the second product.
        """
        if self.simulated and not _NEWER:
            found = use(_dot(pair[0][...], pair[1][...].T))
            other = get_other()
            return found, _dot(other[0][...], other[1][...].T)

        def run(first, second):
            _start_product(first, *pair)
            _start_product(second, *get_other())
            found = use(plgpu.wgmma_accumulator_load(first, wait_n=1))
            return found, second[...]

        return pl.run_scoped(run, _accumulator(*pair), _accumulator(*pair))

    def accumulate(
        self, *sums: tuple[jax.Array, jax.Array, Any]
    ) -> tuple[jax.Array, ...]:
        """Adds products to registers, all under way at once.

        Each of `sums` is float32[m, n] and [m, k] in registers, and [k, n] in shared
        memory.
        """
        if self.simulated:
            found = [total + _dot(x.astype(y.dtype), y[...]) for total, x, y in sums]
            plgpu.commit_smem()  # the GPU needs no fence after a read by tensor cores
            return tuple(found)

        def run(refs):
            for ref, (_, x, y) in zip(refs, sums, strict=True):
                plgpu.wgmma(ref, x.astype(y.dtype), y)

        run_with: Any = pl.run_state(run)
        return run_with(tuple(ACC.init(total) for total, _, _ in sums))

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """int32[shape] of indices along an axis."""
        if self.simulated:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        layout = plgpu.Layout.WGMMA
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def broadcast(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A scalar, repeated over a tile."""
        return self.layout_cast(jnp.broadcast_to(x, shape), plgpu.Layout.WGMMA)


def _accumulator(x, y):
    return ACC((x.shape[0], y.shape[0]), jnp.float32)


def _start_product(total, x, y):
    plgpu.wgmma(total, x, y.transpose((1, 0)))


def _dot(x, y):
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32))
