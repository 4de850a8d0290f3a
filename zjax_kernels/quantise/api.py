"""Blocks of 8-bit integers in place of numbers, and back."""

import jax.numpy as jnp
from jax import Array

from zjax_kernels.device import choose_implementation
from zjax_kernels.errors import invalid
from zjax_kernels.quantise import mosaic_gpu, reference


def quantise_blocks(
    x: Array, *, block: int = 256, implementation: str = "auto"
) -> tuple[Array, Array]:
    """Rounds each block to whole multiples of its largest magnitude over 127.

    Args:
        x: [...] floats, in number a multiple of `block`.
        block: Consecutive numbers that share a scale, 1 or more.
        implementation: `mosaic_gpu`, for blocks of 64, 128 or 256 float32 numbers,
            64 blocks or a multiple, on one Hopper GPU; `reference`, anywhere and in any
            split; or `auto`, which takes the latter where the compiler splits a mesh
            that is in use.

    Returns:
        int8[N / block, block] from -127 to 127, and float32[N / block] scales, which
        are not finite where a number of the block is not.

    Raises:
        ValueError: Numbers that are no whole blocks, or no such implementation, or not
            for these arrays.
        NotImplementedError: `mosaic_gpu` was asked for and this device cannot run it.

    Example:
        >>> numbers = jnp.array([127.0, 1.6, 0, -254])
        >>> integers, scales = quantise_blocks(numbers, block=2)
        >>> integers.tolist(), scales.tolist()
        ([[127, 2], [0, -127]], [1.0, 2.0])

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization
        (arXiv:2110.02861), section 2.1.
    """
    if block < 1 or x.size % block:
        problem = f"does not divide {x.size} numbers"
        raise invalid("block", block, problem, "use a divisor, or pad the numbers")
    what, dtype = "quantisation", jnp.dtype(x.dtype).name
    problem = remedy = ""
    if dtype != "float32":
        problem, remedy = f"it needs float32 and the array is {dtype}", "cast it"
    elif block not in mosaic_gpu.SIZES:
        sizes = ", ".join(map(str, mosaic_gpu.SIZES))
        problem = f"it needs blocks of {sizes} and this is {block}"
        remedy = "choose one of them"
    elif not x.size or x.size // block % mosaic_gpu.BLOCKS:
        problem = f"it needs 64 blocks or a multiple and has {x.size // block}"
        remedy = "pad the numbers"
    chosen = choose_implementation(
        implementation, what, f"blocks of {block}", problem=problem, remedy=remedy
    )
    if chosen == "mosaic_gpu":
        return mosaic_gpu.quantise_blocks(x, block)
    return reference.quantise_blocks(x, block)


def dequantise_blocks(integers: Array, scales: Array) -> Array:
    """The numbers that `quantise_blocks` rounded to.

    XLA makes one program of this and of a sum over what several devices sent, at nine
    tenths of a GPU's bandwidth, so that it has no kernel.

    Args:
        integers: int8[..., blocks, block].
        scales: float32[..., blocks].

    Returns:
        float32[..., blocks * block].

    Example:
        >>> dequantise_blocks(jnp.array([[2, -1]], jnp.int8), jnp.array([0.5])).tolist()
        [1.0, -0.5]
    """
    numbers = integers.astype(jnp.float32) * scales[..., None]
    return numbers.reshape(*numbers.shape[:-2], -1)
