"""Attention of few queries to a paged cache: checks and choice of implementation."""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.latent import shapes as latents
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.device import (
    FLOAT8,
    choose_implementation,
    describe,
    dtype_obstacle,
    load_implementation,
    refuse,
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]
HEAD_SIZES = (64, 128, 256)
"""Channels per head of the kernel."""
PAGE_SIZES = (16, 32, 64, 128, 256)
"""Tokens per page of the kernel."""


def paged_attention(
    q: Array,
    keys: Array,
    values: Array,
    pages: Array,
    starts: Array,
    counts: Array,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
    value_size: int = 0,
    early: bool = False,
    implementation: Implementation = "auto",
) -> Array:
    """Computes softmax(scale q k) v over the cached keys up to each token's own.

    A chunk is some consecutive tokens of a row: one that is decoded, a few that are
    speculated, or a piece of a prompt. The keys of the chunk are in the cache already.

    Args:
        q: [C, T, H, D] queries of T tokens of each chunk.
        keys: [N, KV, page size, D] keys of all rows, in pages; H is a multiple of KV.
            Keys and values may be in float8_e4m3fn, which is read in the dtype of `q`.
        values: [N, KV, page size, Dv] values, in the pages of the keys.
        pages: int32[C, P], pages of the row of each chunk, in order; behind the end of
            the row, and before the window of the first token, any page.
        starts: int32[C], position of the first token of each chunk in the row.
        counts: int32[C], tokens of each chunk that count, 0 to T.
        scale: Factor of the scores, above 0; None is 1 / sqrt(D).
        window: Keys that a token sees, the last its own; 0 is all.
        soft_cap: Bound of the scores, by `soft_cap * tanh(score / soft_cap)`; 0 is
            none.
        sinks: [H] scores of a key without value, one per head, or None.
        value_size: Channels of the values that are read, the first; 0 is all. With it,
            `values` may be `keys`, as in latent attention.
        early: Whether the kernel is launched while the operation before still runs, and
            waits for the result on the GPU (dependent launch, JAX 0.11.2 or newer). For
            chunks of one token, pages, starts, counts and keys at positions before
            `starts` are read without this wait: the operation before may have written
            only `q`, and keys and values at `starts`.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, or pages in float8,
            D and Dv both 64, 128 or 256, pages of 16, 32, ... 256 tokens), `reference`
            (anywhere, any sharding of heads), or `auto`: `mosaic_gpu` where possible,
            logged once. Latents, which `mosaic_gpu` reads once, are one array for keys
            and values, with D a multiple of 64 up to 576, a smaller `value_size` of
            128, 256, 384 or 512, and H / KV 8, 16, 32, 64 or 128, without window, cap
            and sinks.

    Returns:
        [C, T, H, Dv], or [C, T, H, value_size], in the dtype of `q`; 0 for tokens that
        do not count. There is no gradient rule.

    Raises:
        ValueError: Shapes or numbers do not fit, an unknown implementation, or arrays
            that the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> pool, pages = jnp.ones((3, 1, 4, 8)), jnp.array([[2, 1]])
        >>> q, starts, counts = jnp.ones((1, 1, 2, 8)), jnp.array([5]), jnp.array([1])
        >>> paged_attention(q, pool, pool, pages, starts, counts).shape
        (1, 1, 2, 8)

    Reference:
        Kwon et al., PagedAttention (arXiv:2309.06180); the splits of Dao et al.,
        Flash-Decoding (2023); latents: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    cache = Cache(keys, values, pages, starts, counts)
    _check(q, cache, sinks, scale, window, soft_cap, value_size)
    size = q.shape[-1]
    options = Options(
        scale=1 / math.sqrt(size) if scale is None else float(scale),
        window=window,
        soft_cap=float(soft_cap),
        value_size=value_size or values.shape[-1],
        early=early,
    )
    problem, remedy = _obstacle(q, cache, sinks, options)
    chosen = choose_implementation(
        implementation,
        "paged attention",
        f"{keys.dtype.name}, head size {size}, pages of {keys.shape[2]}",
        problem=problem,
        remedy=remedy,
    )
    has_kernel = chosen == "mosaic_gpu" and latents.has_sizes(cache, options)
    package = "decode.latent" if has_kernel else "decode"
    run = load_implementation(package, chosen).paged_attention
    return run(q, cache, sinks, options)


def _obstacle(
    q: Array, cache: Cache, sinks: Array | None, options: Options
) -> tuple[str, str]:
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    are_latents = latents.has_sizes(cache, options)
    are_narrow = cache.keys.dtype == cache.values.dtype == FLOAT8 and not are_latents
    obstacle = dtype_obstacle(q, *([] if are_narrow else cache[:2]))
    if are_latents and not any(obstacle):
        obstacle = latents.obstacle(q, cache, sinks, options)
    if any(obstacle):
        return obstacle
    sizes = q.shape[-1], cache.values.shape[-1], options.value_size
    known_sizes = are_latents or (len(set(sizes)) == 1 and sizes[0] in HEAD_SIZES)
    if not known_sizes:
        known = ", ".join(map(str, HEAD_SIZES))
        problem = f"it needs keys and values of {known} channels, not {sizes[0]} and "
        return problem + str(sizes[2]), "pad the heads"
    if cache.keys.shape[2] not in PAGE_SIZES:
        known = ", ".join(map(str, PAGE_SIZES))
        problem = f"it needs pages of {known} tokens and these have "
        return problem + str(cache.keys.shape[2]), "make other pages"
    if not q.size:
        return f"it needs queries and the array is {q.shape}", "give some"
    return "", ""


def _check(
    q: Any,
    cache: Cache,
    sinks: Any,
    scale: float | None,
    window: int,
    soft_cap: float,
    value_size: int,
) -> None:
    """Refuses arrays that do not fit one another, and numbers out of range."""
    problems = []
    arrays = {"q": (q, "[C, T, H, D]"), "keys": (cache.keys, "[N, KV, page size, D]")}
    arrays["values"] = cache.values, "[N, KV, page size, Dv]"
    for name, (array, form) in arrays.items():
        if array.ndim != 4:
            problem, remedy = "does not have 4 dims", f"give {form}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
    refuse(problems)
    shape = cache.keys.shape
    if shape[3] != q.shape[3]:
        problem = f"does not fit q of {q.shape[3]} channels"
        problems.append(describe("keys.shape", shape, problem, "give as many"))
    if q.shape[2] % shape[1]:
        problem = f"does not group {q.shape[2]} query heads"
        remedy = "give heads of keys that divide the heads of queries"
        problems.append(describe("keys.shape", shape, problem, remedy))
    if cache.values.shape[:3] != shape[:3]:
        problem, remedy = f"does not fit keys of shape {shape}", "give the same pages"
        problems.append(describe("values.shape", cache.values.shape, problem, remedy))
    problems += _table_problems(cache, q.shape[0])
    if sinks is not None and sinks.shape != q.shape[2:3]:
        problem, remedy = f"does not fit {q.shape[2]} heads", "give one for each"
        problems.append(describe("sinks.shape", sinks.shape, problem, remedy))
    numbers: dict[str, tuple[float, float]] = {
        "window": (window, math.inf),
        "soft_cap": (soft_cap, math.inf),
        "value_size": (value_size, cache.values.shape[3]),
    }
    for name, (value, most) in numbers.items():
        if not 0 <= value <= most:
            problem, remedy = f"is not within 0 and {most}", "use 0 for none"
            problems.append(describe(name, value, problem, remedy))
    if scale is not None and not 0 < scale < math.inf:
        problems.append(describe("scale", scale, "is not above 0", "give a factor"))
    refuse(problems)


def _table_problems(cache: Cache, chunks: int) -> list[str]:
    """Reports pages, starts and counts that are not integers for each chunk."""
    problems = []
    for name in ("pages", "starts", "counts"):
        array = getattr(cache, name)
        dims = 2 if name == "pages" else 1
        if array.ndim != dims or array.shape[0] != chunks:
            problem = f"does not fit {chunks} chunks"
            remedy = f"give {'[C, P]' if dims == 2 else '[C]'}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
        if not jnp.issubdtype(array.dtype, jnp.integer):
            problem, remedy = "is not of integers", "use int32"
            problems.append(describe(f"{name}.dtype", array.dtype, problem, remedy))
    return problems
