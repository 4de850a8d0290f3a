"""Rotation and writes of decoded tokens: checks and choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.api import HEAD_SIZES
from zjax_kernels.decode.rotate.reference import Operands, Options
from zjax_kernels.device import (
    FLOAT8,
    choose_implementation,
    describe,
    dtype_obstacle,
    load_implementation,
    refuse,
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]
LANES = 32
"""Channels that the kernel takes multiples of: the lanes of a warp."""
MIN_HEADS = 4
"""Heads of queries, keys and values of a program of the kernel."""


def rotate_and_write(
    product: Array,
    keys: Array,
    values: Array,
    pages: Array,
    starts: Array,
    counts: Array,
    *,
    bias: Array | None = None,
    norms: tuple[Array, Array, float] | None = None,
    rotation: tuple[Array, Array] | None = None,
    query_scale: float = 1.0,
    early: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Array, Array, Array]:
    """Rotates queries and keys of decoded tokens, and writes keys and values to pages.

    Each token is the next one of another row. Pools are updated in place where a jitted
    function donates them.

    Args:
        product: [N, (H + 2 KV) D] queries, keys and values of N tokens, side by side.
        keys: [pages, KV, page size, D] keys of all rows. In float8_e4m3fn, magnitudes
            beyond 448, the largest, become 448.
        values: [pages, KV, page size, D] values of all rows.
        pages: int32[N, P], pages of the row of each token, in order.
        starts: int32[N], position of each token in the row.
        counts: int32[N], 1 for tokens that are written, 0 for others.
        bias: [(H + 2 KV) D] that is added to the product, or None.
        norms: Scales [D] of RMS norms of each head of queries and of keys before the
            rotation, and the number added to the mean square, at least 0; or None.
        rotation: float32[N, half] cosines and sines by which channel c and channel
            c + half of queries and keys rotate, for c < half; None for no rotation.
        query_scale: Factor of the rotated queries.
        early: Whether the kernel is launched while the operations before still run, and
            waits for their results on the GPU (dependent launch, JAX 0.11.2 or newer).
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays of one dtype, or
            pages in float8, D of 64, 128 or 256, `half` and D - 2 `half` multiples of
            32, 4 heads or more), `reference` (anywhere, any sharding of heads), or
            `auto`: `mosaic_gpu` where possible, logged once.

    Returns:
        [N, 1, H, D] queries in the dtype of `product`, keys and values. There is no
        gradient rule.

    Raises:
        ValueError: Shapes do not fit, an unknown implementation, or arrays that the
            kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> product, pool = jnp.ones((1, 8)), jnp.zeros((2, 1, 4, 2))
        >>> pages, starts, counts = jnp.array([[1]]), jnp.array([3]), jnp.array([1])
        >>> q, keys, _ = rotate_and_write(product, pool, pool, pages, starts, counts)
        >>> q.shape, keys[1, 0].tolist()
        ((1, 1, 2, 2), [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])

    Reference:
        Su et al., RoFormer (arXiv:2104.09864); Kwon et al., PagedAttention
        (arXiv:2309.06180).
    """
    _check(product, keys, values, (pages, starts, counts))
    _check_optional(product, keys.shape[3], bias, norms, rotation)
    _, num_keys, _, size = keys.shape
    num_heads = product.shape[1] // size
    by_head = num_heads, size
    operands = Operands(
        product.reshape(-1, *by_head),
        None if bias is None else bias.reshape(by_head),
        None if norms is None else norms[:2],
        rotation,
        pages,
        starts,
        counts,
    )
    eps = 0.0 if norms is None else norms[2]
    options = Options(
        num_queries=num_heads - 2 * num_keys,
        eps=float(eps),
        query_scale=query_scale,
        early=early,
    )
    problem, remedy = _obstacle(operands, keys, values)
    chosen = choose_implementation(
        implementation,
        "rotation of decoded tokens",
        f"{product.dtype.name}, head size {size}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.rotate", chosen).rotate_and_write
    return run(operands, keys, values, options)


def _obstacle(operands: Operands, keys: Array, values: Array) -> tuple[str, str]:
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    _, num_heads, size = operands.product.shape
    are_narrow = keys.dtype == values.dtype == FLOAT8
    obstacle = dtype_obstacle(operands.product, *([] if are_narrow else [keys, values]))
    if any(obstacle):
        return obstacle
    if size not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return f"it needs heads of {known} channels, not {size}", "pad the heads"
    half = 0 if operands.rotation is None else operands.rotation[0].shape[-1]
    if half % LANES or (size - 2 * half) % LANES:
        problem = f"it needs a multiple of {LANES} rotated pairs, not {half}"
        return problem, "pad the heads"
    if num_heads < MIN_HEADS:
        problem = f"it needs {MIN_HEADS} heads or more, not {num_heads}"
        return problem, "use more"
    if not operands.product.size:
        return "it needs tokens and there are none", "give tokens"
    return "", ""


def _check(product, keys, values, places):
    """Refuses tokens, pools and places that do not fit one another."""
    problems = []
    if product.ndim != 2:
        problem, remedy = "does not have 2 dims", "give [N, (H + 2 KV) D]"
        problems.append(describe("product.shape", product.shape, problem, remedy))
    if keys.ndim != 4 or keys.shape != values.shape:
        problem = f"does not fit values of shape {values.shape}"
        remedy = "give two [pages, KV, page size, D]"
        problems.append(describe("keys.shape", keys.shape, problem, remedy))
    refuse(problems)
    num_tokens, width = product.shape
    _, num_keys, _, size = keys.shape
    if width % size or width // size <= 2 * num_keys:
        problem = f"does not hold queries beside {num_keys} keys and values of {size} "
        problem, remedy = problem + "channels", "give [N, (H + 2 KV) D]"
        problems.append(describe("product.shape", product.shape, problem, remedy))
    for name, array in zip(("pages", "starts", "counts"), places, strict=True):
        dims = 2 if name == "pages" else 1
        if array.ndim != dims or array.shape[0] != num_tokens:
            problem = f"does not fit {num_tokens} tokens"
            remedy = f"give {'[N, P]' if dims == 2 else '[N]'}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
        if not jnp.issubdtype(array.dtype, jnp.integer):
            problem, remedy = "is not of integers", "use int32"
            problems.append(describe(f"{name}.dtype", array.dtype, problem, remedy))
    refuse(problems)


def _check_optional(product, size, bias, norms, rotation):
    """Refuses a bias, norms and a rotation that do not fit the product."""
    num_tokens, width = product.shape
    problems, arrays = [], {}
    if bias is not None:
        arrays["bias"] = bias, (width,)
    if norms is not None:
        arrays |= {f"norms[{n}]": (scale, (size,)) for n, scale in enumerate(norms[:2])}
        if norms[2] < 0:
            problems.append(describe("norms[2]", norms[2], "is below 0", "use 1e-5"))
    for number, table in enumerate(rotation or ()):
        half = min(table.shape[-1], size // 2)
        arrays[f"rotation[{number}]"] = table, (num_tokens, half)
    for name, (array, shape) in arrays.items():
        if array.shape != shape:
            problem, remedy = f"does not fit {num_tokens} tokens", f"give {shape}"
            problem += f" of {width} columns, {size} for each head"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
    refuse(problems)
