"""Kernels that compute a row without regard to other rows, and where kernels run.

There is no reference here: another implementation has other bits, so a caller that has
one must not mix the two. The choice therefore follows from device, dtype and shape of
a row, which all programs of a model share, never from the number of rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.api import HEAD_SIZES, PAGE_SIZES
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.device import (
    DTYPES,
    choose_implementation,
    dtype_obstacle,
    invalid,
    load_implementation,
)
from zjax_kernels.norm.reference import MAX_CHANNELS, THREADS

_SIDE = 64
"""Side of a matrix: the kernel takes multiples."""


def has_matmul(x: Array, weights: Array, *, transpose: bool = False) -> bool:
    """Whether `matmul` runs for arrays like these here; the answer is logged once.

    Args:
        x: [M, K] floats; M does not matter, as long as it is not 0.
        weights: [K, N], or [N, K] with `transpose`.
        transpose: Whether the matrix is stored transposed.

    Returns:
        True on one Hopper GPU, for one dtype of 16 bits, K a multiple of 64, and N too
        without `transpose`.

    Example:
        >>> has_matmul(jnp.ones((1, 64)), jnp.ones((64, 64)))  # not of 16 bits
        False
    """
    problem, _ = dtype_obstacle(x, weights)
    sides = weights.shape[::-1] if transpose else weights.shape
    # Rows of a transposed matrix beyond the end are read as zeros.
    whole = sides[:1] if transpose else sides
    if not problem and any(side % _SIDE for side in whole):
        problem = f"it needs matrices with sides of 64, 128, ..., not {sides}"
    if not problem and not (len(x) and all(sides)):
        problem = "it needs numbers"
    arrays = f"{x.dtype.name}, matrices of {sides}"
    return _runs("batch-invariant product", arrays, problem)


def matmul(
    x: Array, weights: Array, *, transpose: bool = False, dtype: Any = None
) -> Array:
    """Multiplies rows by a matrix: no bit of a row depends on another row.

    The sum over K is one chain of tensor core instructions, in order, in an accumulator
    of float32, for each number of rows. There is no gradient rule.

    Args:
        x: [M, K] rows for which `has_matmul` is true.
        weights: [K, N] in the dtype of `x`, or [N, K] with `transpose`; read as stored.
        transpose: Whether the matrix is stored transposed.
        dtype: Dtype of the result: None for the dtype of `x`, or float32.

    Returns:
        [M, N], rounded once.

    Example:
        >>> x, weights = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((64, 64))
        >>> if has_matmul(x, weights.astype(x.dtype)):
        ...     matmul(x, weights.astype(x.dtype)).shape

    Reference:
        He et al., Defeating Nondeterminism in LLM Inference (2025).
    """
    run = load_implementation("invariant", "mosaic_gpu").matmul
    return run(x, weights, transpose=transpose, dtype=jnp.dtype(dtype or x.dtype))


def has_log_partition(scores: Array) -> bool:
    """Whether `log_partition` runs for scores like these here.

    Args:
        scores: [N, V] floats.

    Returns:
        True on one Hopper GPU, for float32 and V a multiple of 128.

    Example:
        >>> has_log_partition(jnp.ones((1, 100)))
        False
    """
    columns, problem = scores.shape[-1], ""
    if scores.dtype != jnp.float32:
        problem = f"it needs float32 and the scores are {scores.dtype.name}"
    elif columns % THREADS or not scores.size:
        problem = f"it needs rows of 128, 256, ..., not {columns}"
    return _runs("batch-invariant partition", f"{columns} columns", problem)


def log_partition(scores: Array) -> Array:
    """Computes `log sum_v exp(scores)`: no bit of a row depends on another row.

    There is no gradient rule.

    Args:
        scores: float32[N, V] for which `has_log_partition` is true.

    Returns:
        float32[N].

    Example:
        >>> scores = jnp.zeros((2, 128))
        >>> if has_log_partition(scores):
        ...     log_partition(scores).shape

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax
        (arXiv:1805.02867), section 2.
    """
    return load_implementation("invariant", "mosaic_gpu").log_partition(scores)


def has_norm(x: Array) -> bool:
    """Whether the kernels of `zjax_kernels.norm` run for rows like these here.

    A norm kernel reads each row alone, hence in one order.

    Args:
        x: [..., C] floats.

    Returns:
        True on one Hopper GPU, for rows of 16 bits and 128, 256, ... 4096 channels.

    Example:
        >>> has_norm(jnp.ones((1, 128)))  # not of 16 bits
        False
    """
    channels, problem = x.shape[-1], ""
    if x.dtype.name not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the array is {x.dtype.name}"
    elif channels % THREADS or not 0 < channels <= MAX_CHANNELS or not x.size:
        problem = f"it needs rows of 128, 256, ... {MAX_CHANNELS}, not {channels}"
    arrays = f"{x.dtype.name}, {channels} channels"
    return _runs("batch-invariant norm", arrays, problem)


def has_attention(q: Array, keys: Array, values: Array) -> bool:
    """Whether `packed_attention` and `paged_attention` run for heads like these here.

    Args:
        q: [..., D] queries of a head.
        keys: [..., D] keys of rows or of pages.
        values: [..., Dv] values.

    Returns:
        True on one Hopper GPU, for one dtype of 16 bits, D and Dv both 64, 128 or 256.

    Example:
        >>> x = jnp.ones((1, 1, 1, 64))  # not of 16 bits
        >>> has_attention(x, x, x)
        False
    """
    sizes = q.shape[-1], values.shape[-1]
    problem, _ = dtype_obstacle(q, keys, values)
    if not problem and (sizes[0] != sizes[1] or sizes[0] not in HEAD_SIZES):
        known = ", ".join(map(str, HEAD_SIZES))
        problem = f"it needs keys and values of {known} channels, not {sizes[0]} and "
        problem += str(sizes[1])
    if not problem and not q.size:
        problem = "it needs queries"
    arrays = f"{q.dtype.name}, head size {sizes[0]}"
    return _runs("batch-invariant attention", arrays, problem)


def packed_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Computes causal attention within the texts of packed rows.

    A token gets the bits of `paged_attention`, wherever the text is in a row. There is
    no gradient rule.

    Args:
        q: [B, L, H, D] queries for which `has_attention` is true.
        keys: [B, L, KV, D] keys; H is a multiple of KV.
        values: [B, L, KV, D] values.
        positions: int32[B, L], position of each token in the text; 0 begins a text, and
            so does each row.
        scale: Factor of the scores, above 0.
        window: Number of keys that a token sees, back from the token; 0 is all.
        soft_cap: Bound of the scores, by `soft_cap * tanh(score / soft_cap)`; 0 is
            none.
        sinks: [H] scores of a key without value, one per head, or None.

    Returns:
        [B, L, H, D] in the dtype of `q`.

    Example:
        >>> x, positions = jnp.ones((1, 3, 2, 64), jnp.bfloat16), jnp.array([[0, 1, 0]])
        >>> if has_attention(x, x, x):
        ...     packed_attention(x, x, x, positions, scale=0.125).shape

    Reference:
        Dao, FlashAttention-2 (arXiv:2307.08691).
    """
    options = Options(scale, window, float(soft_cap), values.shape[-1])
    run = load_implementation("invariant", "mosaic_gpu").packed_attention
    return run(q, keys, values, positions, sinks, options)


def paged_attention(
    q: Array,
    keys: Array,
    values: Array,
    pages: Array,
    starts: Array,
    counts: Array,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Computes attention to pages as `zjax_kernels.paged_attention` does, in one order.

    One program has all keys of a tile of queries, in blocks from the first key of the
    text on. A token gets the bits of `packed_attention`, whatever the chunks and the
    pages are. There is no gradient rule.

    Args:
        q: [C, T, H, D] queries for which `has_attention` is true.
        keys: [N, KV, page size, D] keys of all rows, in pages.
        values: [N, KV, page size, D] values, in the pages of the keys.
        pages: int32[C, P], pages of the row of each chunk, in order.
        starts: int32[C], position of the first token of each chunk in the row.
        counts: int32[C], tokens of each chunk that count, 0 to T.
        scale: Factor of the scores, above 0.
        window: Number of keys that a token sees, back from the token; 0 is all.
        soft_cap: As for `packed_attention`.
        sinks: As for `packed_attention`.

    Returns:
        [C, T, H, D] in the dtype of `q`; 0 for tokens that do not count.

    Raises:
        ValueError: The kernel does not read pages of the given size.

    Example:
        >>> x, n = jnp.ones((1, 1, 16, 64), jnp.bfloat16), jnp.zeros(1, int)
        >>> if has_attention(x, x, x):
        ...     paged_attention(x, x, x, n[None], n, n + 1, scale=0.125).shape

    Reference:
        Kwon et al., PagedAttention (arXiv:2309.06180).
    """
    if keys.shape[2] not in PAGE_SIZES:
        known = ", ".join(map(str, PAGE_SIZES))
        problem = "has no kernel, and packed rows of these heads run one"
        raise invalid("page_size", keys.shape[2], problem, f"use {known}")
    options = Options(scale, window, float(soft_cap), values.shape[-1])
    cache = Cache(keys, values, pages, starts, counts)
    run = load_implementation("invariant", "mosaic_gpu").paged_attention
    return run(q, cache, sinks, options)


def _runs(operation: str, arrays: str, problem: str) -> bool:
    """Whether a kernel runs here for arrays with a problem, or with none."""
    if not problem and num_devices() > 1:
        # Even inside `shard_map`: a sampler may be split where a trainer is not.
        problem = f"it is for one device and there are {num_devices()}"
    chosen = choose_implementation(
        "auto", operation, arrays, problem=problem, remedy=""
    )
    return chosen == "mosaic_gpu"


def num_devices() -> int:
    """Returns the devices of the mesh in use, or of all processes without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() if mesh.empty else mesh.size
