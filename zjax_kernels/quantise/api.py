"""Block-wise int8 quantisation and dequantisation."""

import jax.numpy as jnp
from jax import Array

from zjax_kernels.device import choose_implementation, invalid, load_implementation
from zjax_kernels.quantise.reference import BLOCKS_PER_STEP, SIZES


def quantise_blocks(
    x: Array, *, block: int = 256, implementation: str = "auto"
) -> tuple[Array, Array]:
    """Rounds a block to int8 multiples of a scale, the largest magnitude over 127.

    Args:
        x: [...] floats, N numbers in all; N is a multiple of `block`.
        block: Consecutive numbers that share a scale, 1 or more.
        implementation: `mosaic_gpu` (one Hopper GPU, float32, a multiple of 64 blocks
            of 64, 128 or 256 numbers), `reference` (anywhere, any sharding), or `auto`,
            which takes `reference` where the compiler shards the program.

    Returns:
        int8[N / block, block] from -127 to 127, and float32[N / block] scales, not
        finite where a number of the block is not.

    Raises:
        ValueError: `block` does not divide N, an unknown implementation, or arrays that
            the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

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
    operation, dtype = "quantisation", jnp.dtype(x.dtype).name
    problem = remedy = ""
    if dtype != "float32":
        problem, remedy = f"it needs float32 and the array is {dtype}", "cast it"
    elif block not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        problem = f"it needs blocks of {sizes} and this is {block}"
        remedy = "choose one of them"
    elif not x.size or x.size // block % BLOCKS_PER_STEP:
        problem = f"it needs 64 blocks or a multiple and has {x.size // block}"
        remedy = "pad the numbers"
    chosen = choose_implementation(
        implementation, operation, f"blocks of {block}", problem=problem, remedy=remedy
    )
    return load_implementation("quantise", chosen).quantise_blocks(x, block)


def dequantise_blocks(integers: Array, scales: Array) -> Array:
    """Restores float32[..., N] from int8[..., blocks, block] and scales[..., blocks].

    XLA fuses this with a sum over devices, at nine tenths of the memory bandwidth of a
    GPU, so there is no kernel.

    Example:
        >>> dequantise_blocks(jnp.array([[2, -1]], jnp.int8), jnp.array([0.5])).tolist()
        [1.0, -0.5]
    """
    numbers = integers.astype(jnp.float32) * scales[..., None]
    return numbers.reshape(*numbers.shape[:-2], -1)
