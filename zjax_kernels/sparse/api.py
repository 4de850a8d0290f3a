"""Attention over the live blocks of a plan: one function, differentiable anywhere."""

import dataclasses
import functools
import math
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from zjax_kernels.device import check_implementation
from zjax_kernels.errors import invalid, refuse
from zjax_kernels.sparse import reference
from zjax_kernels.sparse.arguments import no_array
from zjax_kernels.sparse.plan import Plan, check_plan, plan_of_device
from zjax_kernels.sparse.reference import Options

Implementation = Literal["auto", "mosaic_gpu", "reference"]
DTYPES = ("bfloat16", "float16", "float32", "float64")
_NO_DOCUMENT, _LAST_DOCUMENT = -(2**31), 2**31 - 1
SAVED = "sparse_attention"
"""Name of what the backward pass needs of the forward pass, for recomputation."""


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    key_mask: jax.Array | None = None,
    return_lse: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Averages the values by softmax(scale q k) over the keys in live blocks.

    It is differentiable once, in reverse mode.

    Args:
        q: [B, S, H, D] queries; S is `plan.num_queries`.
        k: [B, T, K, D] keys; T is `plan.num_keys` and H a multiple of K.
        v: [B, T, K, D] values.
        plan: From `make_plan`, for H heads of queries and K of keys.
        scale: Factor of the scores, above 0; 1 / sqrt(D) if none.
        soft_cap: Bends scores into (-soft_cap, soft_cap); 0 leaves them.
        segment_ids: int32[B, S] and int32[B, T], documents of the queries and of the
            keys; documents do not see each other. Numbers of other dtypes are cast to
            int32: traced ones must lie from -(2**31 - 1) to 2**31 - 1, others are
            refused where they do not.
        key_mask: bool[B, T], false for keys that none sees, such as padding.
        return_lse: Whether to return the logarithms of the sums of exponentials too.
        implementation: `mosaic_gpu` runs on Hopper GPUs, `reference` anywhere; `auto`
            takes the first that the first device of this process can run, and says
            once what it took.

    Returns:
        [B, S, H, D] in the dtype of `q`, and float32[B, H, S] if `return_lse`. A query
        that sees no key has 0 and -inf, and passes no gradient on.

    Raises:
        ValueError: Shapes or dtypes do not fit each other or the plan.
        NotImplementedError: This device cannot run what was asked for.

    Example:
        >>> import numpy as np
        >>> from zjax_kernels.sparse import BlockLayout, make_plan
        >>> live = np.tri(4, dtype=bool)
        >>> layout = BlockLayout.from_dense(live, block=16, num_heads=2, causal=True)
        >>> x = jnp.ones((1, 64, 2, 8))
        >>> sparse_attention(x, x, x, make_plan(layout)).shape
        (1, 64, 2, 8)

    Reference:
        Child et al. (arXiv:1904.10509); the online softmax of Dao et al.
        (arXiv:2205.14135), algorithm 1.
    """
    plan = plan_of_device(plan)
    _check(q, k, v, plan, scale, soft_cap)
    static, padded, segments, plan = _prepare(
        q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
    )
    found: Any = _attend(static, *padded, segments, plan)
    out, lse = found
    out = out[:, : q.shape[1]]
    return (out, lse[:, :, : q.shape[1]]) if return_lse else out


def sparse_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    key_mask: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some keys add to the gradients of attention over these and others.

    Of attention over all keys at once, `sparse_attention` has gradients of its own.

    Args:
        q: [B, S, H, D] queries.
        k: [B, T, K, D] keys of this part.
        v: [B, T, K, D] values.
        plan: From `make_plan`, for this part.
        d_out: [B, S, H, D] gradient of the averages over all parts.
        lse: float32[B, H, S] logarithms of the sums of exponentials over all parts.
        delta: float32[B, H, S] sums over D of `d_out` times those averages.
        scale: As in `sparse_attention`, like all that follow.
        soft_cap: Bends scores.
        segment_ids: Documents of the queries and of the keys.
        key_mask: False for keys that none sees.
        implementation: What runs.

    Returns:
        Gradients in the shapes and dtypes of `q`, `k` and `v`.

    Raises:
        ValueError: Shapes or dtypes do not fit each other or the plan.
        NotImplementedError: This device cannot run what was asked for.

    Example:
        >>> import numpy as np
        >>> from zjax_kernels.sparse import BlockLayout, make_plan
        >>> live = np.ones((1, 1), bool)
        >>> plan = make_plan(BlockLayout.from_dense(live, block=16, num_heads=1))
        >>> x, sums = jnp.ones((1, 16, 1, 8)), jnp.zeros((1, 1, 16))
        >>> found = sparse_attention_gradients(x, x, x, plan, x, sums, sums)
        >>> [x.shape for x in found]
        [(1, 16, 1, 8), (1, 16, 1, 8), (1, 16, 1, 8)]
    """
    plan = plan_of_device(plan)
    _check(q, k, v, plan, scale, soft_cap)
    _check_gradients(q, d_out, lse, delta)
    static, padded, segments, plan = _prepare(
        q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
    )
    missing = plan.queries.num_rows - q.shape[1]
    lse, delta = (jnp.pad(x, [(0, 0), (0, 0), (0, missing)]) for x in (lse, delta))
    d_out = _lengthen(d_out.astype(q.dtype), plan.queries.num_rows)
    dq, dk, dv = static.gradients(*padded, d_out, lse, delta, segments, plan)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _prepare(
    q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
) -> Any:
    """What runs, and its arguments in whole tiles."""
    chosen = check_implementation(
        implementation, dtype=q.dtype.name, head_size=q.shape[-1]
    )
    options = Options(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(soft_cap),
    )
    lengths = plan.queries.num_rows, plan.keys.num_rows
    segments = _segments(segment_ids, key_mask, q.shape[:2], k.shape[:2])
    if chosen == "mosaic_gpu":
        check_plan(plan, head_size=q.shape[-1], segmented=segments is not None)
    if segments is not None:
        segments = tuple(map(_lengthen, segments, lengths))
    padded = (_lengthen(q, lengths[0]), *(_lengthen(x, lengths[1]) for x in (k, v)))
    return _Static(chosen, options), padded, segments, jax.tree.map(jnp.asarray, plan)


@dataclasses.dataclass(frozen=True)
class _Static:
    implementation: str
    options: Options

    @property
    def passes(self):
        if self.implementation == "reference":
            return reference
        from zjax_kernels.sparse import mosaic_gpu

        return mosaic_gpu

    def gradients(self, q, k, v, d_out, lse, delta, segments, plan):
        args = q, k, v, d_out, lse, delta, segments
        dq = self.passes.backward_queries(*args, plan.queries, self.options)
        return dq, *self.passes.backward_keys(*args, plan.keys, self.options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Any, q: Any, k: Any, v: Any, segments: Any, plan: Any) -> Any:
    return static.passes.forward(q, k, v, segments, plan.queries, static.options)


def _attend_forward(static, q, k, v, segments, plan):
    found: Any = _attend(static, q, k, v, segments, plan)
    out, lse = (checkpoint_name(x, SAVED) for x in found)
    return (out, lse), (q, k, v, out, lse, segments, plan)


def _attend_backward(static, saved, gradients):
    q, k, v, out, lse, segments, plan = saved
    d_out, d_lse = gradients
    delta = jnp.einsum("bshd,bshd->bhs", out, d_out, preferred_element_type=jnp.float32)
    delta -= jnp.where(jnp.isneginf(lse), 0.0, d_lse)
    args = q, k, v, d_out.astype(q.dtype), lse, delta, segments
    return *static.gradients(*args, plan), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _segments(segment_ids, key_mask, queries, keys):
    if segment_ids is None and key_mask is None:
        return None
    if segment_ids is None:
        segment_ids = jnp.zeros(queries, jnp.int32), jnp.zeros(keys, jnp.int32)
    if not isinstance(segment_ids, tuple | list) or len(segment_ids) != 2:
        remedy = "give two, of the queries and of the keys"
        raise invalid(
            "segment_ids", type(segment_ids).__name__, "is not a pair", remedy
        )
    segment_ids = [x if hasattr(x, "dtype") else np.asarray(x) for x in segment_ids]
    for x in segment_ids:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            problem = "is not one of integers"
            raise invalid("segment_ids.dtype", x.dtype, problem, "number the documents")
    shapes = tuple(x.shape for x in segment_ids)
    if shapes != (queries, keys):
        problem = f"does not fit queries of shape {queries} and keys of shape {keys}"
        raise invalid("segment_ids.shape", shapes, problem, "give one number per token")
    for x in segment_ids:
        _check_documents(x)
    of_queries, of_keys = (jnp.asarray(x, jnp.int32) for x in segment_ids)
    if key_mask is None:
        return of_queries, of_keys
    key_mask = key_mask if hasattr(key_mask, "dtype") else np.asarray(key_mask)
    if key_mask.dtype != bool:
        remedy = "give True for keys that are seen"
        raise invalid("key_mask.dtype", key_mask.dtype, "is not bool", remedy)
    if key_mask.shape != keys:
        problem = f"does not fit keys of shape {keys}"
        raise invalid("key_mask.shape", key_mask.shape, problem, "give one per key")
    return of_queries, jnp.where(key_mask, of_keys, _NO_DOCUMENT)


def _check_documents(ids):
    """Numbers that int32 has not would be others."""
    if isinstance(ids, Tracer):
        return
    with jax.ensure_compile_time_eval():
        ends = int(ids.min()), int(ids.max())
    if not _NO_DOCUMENT < ends[0] <= ends[1] <= _LAST_DOCUMENT:
        problem = f"is not from {-_LAST_DOCUMENT} to {_LAST_DOCUMENT}"
        raise invalid("segment_ids", ends, problem, "number the documents from 0")


def _lengthen(x, length):
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *rest])


def _check(q, k, v, plan, scale, soft_cap):
    """Raises what is wrong with the arguments."""
    check_plan(plan)
    for name, x in (("q", q), ("k", k), ("v", v)):
        refuse(no_array(name, x, "[batch, tokens, heads, channels]"))
    if q.dtype.name not in DTYPES:
        known = ", ".join(DTYPES)
        problem = "is not one that attention is computed in"
        raise invalid("q.dtype", q.dtype, problem, f"cast to one of {known}")
    if 0 in (q.shape[:1] + q.shape[-1:]):
        problem, remedy = "has no sequence or no channel", "give one or more of both"
        raise invalid("q.shape", q.shape, problem, remedy)
    heads, kv_heads = plan.queries.num_heads, plan.keys.num_heads
    for name, x, length, num_heads in (
        ("q", q, plan.num_queries, heads),
        ("k", k, plan.num_keys, kv_heads),
        ("v", v, plan.num_keys, kv_heads),
    ):
        expected = (q.shape[0], length, num_heads, q.shape[-1])
        if x.shape != expected:
            raise invalid(
                f"{name}.shape",
                x.shape,
                f"is not {expected}, as the plan asks",
                "make a plan for this length and these heads, or pad the sequence",
            )
        if x.dtype != q.dtype:
            remedy = f"cast all to {q.dtype}"
            raise invalid(
                f"{name}.dtype", x.dtype, f"is not that of q, {q.dtype}", remedy
            )
    _check_factors(scale, soft_cap)


def _check_gradients(q, d_out, lse, delta):
    batch, length, heads, _ = q.shape
    sums = batch, heads, length
    for name, x, expected in (
        ("d_out", d_out, q.shape),
        ("lse", lse, sums),
        ("delta", delta, sums),
    ):
        refuse(no_array(name, x, str(expected)))
        if x.shape != expected:
            problem = f"is not {expected}, as the queries ask"
            raise invalid(f"{name}.shape", x.shape, problem, "give all queries")


def _check_factors(scale, soft_cap):
    for name, x in (("scale", scale), ("soft_cap", soft_cap)):
        if isinstance(x, Tracer):
            problem, remedy = "is traced", "give a number known before compilation"
            raise invalid(name, "...", problem, remedy)
        if (x is not None or name == "soft_cap") and not _is_number(x):
            remedy = "give one like 0.125, or none" if name == "scale" else "give 0"
            raise invalid(name, repr(x), "is not a real number", remedy)
    if scale is not None and not 0 < scale < math.inf:
        problem = "is not above 0 and finite"
        raise invalid("scale", scale, problem, "give one like 0.125, or none")
    if not 0 <= soft_cap < math.inf:
        problem = "is not 0 or above and finite"
        raise invalid("soft_cap", soft_cap, problem, "give one like 50, or 0")


def _is_number(x):
    """Arrays of one number are taken too."""
    if isinstance(x, jax.Array | np.ndarray):
        kinds = jnp.integer, jnp.floating
        return x.ndim == 0 and any(jnp.issubdtype(x.dtype, kind) for kind in kinds)
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
