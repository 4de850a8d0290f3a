"""Optimizer moments stored in bfloat16 or int8, and updated in float32."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from zjax.optim.matrices import Names, is_matrix, num_stacked
from zjax.optim.precision import cast_floating
from zjax.optim.rounding import (
    Quantized,
    dequantize,
    measure,
    quantize,
    random_bits,
    round_to_bfloat16,
)
from zjax.sharding.paths import layer_of, owners, path_of

SECOND_MOMENT = "nu"
"""Optax's name of the second moment."""


class StoredMoments(NamedTuple):
    """State of `store_moments`.

    Args:
        count: int32[]; number of updates, which seeds the rounding.
        state: State of the inner transformation, with its moments as stored.
    """

    count: Any
    state: Any


def store_moments(
    tx: optax.GradientTransformation, dtype: str, names: Names
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of a transformation in a smaller dtype between updates.

    The update itself is computed in float32; its result has the dtype of the gradients.

    Args:
        tx: Optax transformation. Floating state in the shape of a parameter is a
            moment; under `nu` it is a second moment.
        dtype: `float32`, `bfloat16` or `int8`; in `int8` vectors stay float32.
        names: Dim names by path, which tell matrices from stacked vectors.

    Example:
        >>> tx = store_moments(optax.trace(0.9), "bfloat16", {})
        >>> tx.init({"w": jnp.ones((2, 3))}).state.trace["w"].dtype
        dtype(bfloat16)
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> StoredMoments:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {path_of(keys): (path_of(keys), leaf.shape) for keys, leaf in leaves}
        state = jax.tree_util.tree_map_with_path(
            lambda keys, leaf: _init_stored(keys, leaf, shapes, dtype, names),
            inner.init(cast_floating(params, jnp.float32)),
        )
        return StoredMoments(jnp.zeros((), jnp.int32), state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, StoredMoments]:
        def advance(updates: Any, stored: Any) -> tuple[Any, Any]:
            wide = None if params is None else cast_floating(params, jnp.float32)
            moments = jax.tree.map(_load, stored, is_leaf=_is_quantized)
            updates = cast_floating(updates, jnp.float32)
            return inner.update(updates, moments, wide, **extra)

        stored, scales = state.state, []
        for dim in range(_num_scales(stored)):
            # Updates once more for each scale: a scale needs the largest new moment of
            # a row or column, and all moments in float32 take too much memory. Without
            # the barrier XLA would keep the moments of one pass for the next one.
            found = _measure(stored, advance(updates, stored)[1], dim)
            stored, found = jax.lax.optimization_barrier((stored, found))
            scales.append(found)
        wide, after = advance(updates, stored)
        wide = jax.tree.map(lambda new, old: new.astype(old.dtype), wide, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        return wide, StoredMoments(count, _store(stored, after, scales, count))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_quantized(node: Any) -> bool:
    """Tells codes with scales from plain arrays."""
    return isinstance(node, Quantized)


def _init_stored(
    keys: Any, leaf: Any, shapes: Mapping[str, Any], dtype: str, names: Names
) -> Any:
    """The stored form of a leaf of the inner state."""
    path = next((p for p, s in owners(keys, shapes) if s == leaf.shape), None)
    if path is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    if dtype != "int8":
        return jnp.zeros(leaf.shape, dtype)
    if not is_matrix(path, leaf.ndim, names):
        return leaf
    squares = any(getattr(key, "name", None) == SECOND_MOMENT for key in keys)
    stacked = num_stacked(path, names)
    scales = tuple(
        jnp.zeros(
            [n if d in (*range(stacked), dim) else 1 for d, n in enumerate(leaf.shape)],
            jnp.float32,
        )
        for dim in range(stacked, leaf.ndim)
    )
    return Quantized(jnp.zeros(leaf.shape, jnp.uint8 if squares else jnp.int8), scales)


def _load(leaf: Any) -> Any:
    if _is_quantized(leaf):
        return dequantize(leaf)
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf


def _num_scales(stored: Any) -> int:
    """Counts the scales of the quantized moment that has most of them."""
    forms = jax.tree.leaves(stored, is_leaf=_is_quantized)
    return max((len(form.scales) for form in forms if _is_quantized(form)), default=0)


def _measure(stored: Any, state: Any, number: int) -> Any:
    """Computes one scale of each quantized moment that has so many, else None."""

    def scale(form: Any, leaf: Any) -> Any:
        if not _is_quantized(form) or number >= len(form.scales):
            return None
        return measure(leaf, form.scales[number].shape)

    return jax.tree.map(scale, stored, state, is_leaf=_is_quantized)


def _store(stored: Any, state: Any, scales: list[Any], step: Int32[Array, ""]) -> Any:
    """Converts a state to the dtypes in which `stored` holds it."""

    def store(keys: Any, form: Any, leaf: Any, *found: Any) -> Any:
        if not _is_quantized(form) and form.dtype == leaf.dtype:
            return leaf
        name = f"{path_of(keys)} {layer_of(keys)}"
        bits = random_bits(leaf.shape, step, zlib.crc32(name.encode()))
        if _is_quantized(form):
            scales = found[: len(form.scales)]
            return quantize(leaf, scales, bits, form.codes.dtype)
        return round_to_bfloat16(leaf, bits)

    trees = stored, state, *scales
    return jax.tree_util.tree_map_with_path(store, *trees, is_leaf=_is_quantized)
