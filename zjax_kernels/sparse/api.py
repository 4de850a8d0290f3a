"""Public functions of block-sparse attention: checks, padding, gradients."""

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

from zjax_kernels.device import (
    check_implementation,
    invalid,
    load_implementation,
    refuse,
)
from zjax_kernels.sparse.arguments import array_problems
from zjax_kernels.sparse.plan import Plan, check_plan, device_plan
from zjax_kernels.sparse.reference import BackwardInputs, Options

Implementation = Literal["auto", "mosaic_gpu", "reference"]
DTYPES = ("bfloat16", "float16", "float32", "float64")
_NO_DOCUMENT, _LAST_DOCUMENT = -(2**31), 2**31 - 1
"""Document of hidden keys, which no query can have, and the largest document."""
RESIDUALS = "sparse_attention"
"""`checkpoint_name` of the residuals that are outputs: `out` and `lse`."""


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
    """Computes softmax(scale q k) v over the keys in live blocks.

    It is differentiable once, in reverse mode.

    Args:
        q: [B, S, H, D] queries; S is `plan.num_queries`.
        k: [B, T, K, D] keys; T is `plan.num_keys` and H a multiple of K.
        v: [B, T, K, D] values.
        plan: Plan from `make_plan`, for H query heads and K key heads.
        scale: Factor of the scores, above 0; None is 1 / sqrt(D).
        soft_cap: Bound of the scores, by `soft_cap * tanh(score / soft_cap)`; 0 is
            none.
        segment_ids: int32[B, S] and int32[B, T], documents of queries and of keys; a
            query sees keys of equal number alone. Other integers are cast to int32 and
            must lie from -(2**31 - 1) to 2**31 - 1, which is checked unless traced.
        key_mask: bool[B, T], False for keys that no query sees, such as padding.
        return_lse: Whether to return the log-sum-exp of the scores too.
        implementation: `mosaic_gpu` (Hopper GPUs), `reference` (anywhere), or `auto`:
            `mosaic_gpu` if the first device can run it, logged once.

    Returns:
        [B, S, H, D] in the dtype of `q`, and float32[B, H, S] if `return_lse`. A query
        that sees no key gets 0 and -inf, and no gradient.

    Raises:
        ValueError: Shapes or dtypes do not fit the plan or one another.
        NotImplementedError: This device cannot run the implementation.

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
    plan = device_plan(plan)
    _check(q, k, v, plan, scale, soft_cap)
    static, padded, segments, plan = _prepare(
        q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
    )
    outputs: Any = _attend(static, *padded, segments, plan)
    out, lse = outputs
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
    """Returns the part of one set of keys in the gradients of attention over several.

    For ring attention; `sparse_attention` itself is differentiable.

    Args:
        q: [B, S, H, D] queries.
        k: [B, T, K, D] keys of the set.
        v: [B, T, K, D] values of the set.
        plan: Plan from `make_plan`, for the set.
        d_out: [B, S, H, D] cotangent of the output over all sets.
        lse: float32[B, H, S] log-sum-exp over all sets.
        delta: float32[B, H, S] sum over D of `d_out` times the output over all sets.
        scale: As in `sparse_attention`, like all further arguments.
        soft_cap: Bound of the scores.
        segment_ids: Documents of the queries and of the keys.
        key_mask: False for keys that no query sees.
        implementation: Implementation to run.

    Returns:
        Gradients in the shapes and dtypes of `q`, `k` and `v`.

    Raises:
        ValueError: Shapes or dtypes do not fit the plan or one another.
        NotImplementedError: This device cannot run the implementation.

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
    plan = device_plan(plan)
    _check(q, k, v, plan, scale, soft_cap)
    _check_gradients(q, d_out, lse, delta)
    static, padded, segments, plan = _prepare(
        q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
    )
    missing = plan.queries.num_rows - q.shape[1]
    # Padding queries are in no live cell: any number will do.
    lse, delta = (jnp.pad(x, [(0, 0), (0, 0), (0, missing)]) for x in (lse, delta))
    # Tensor cores multiply matrices of one dtype.
    d_out = _pad_tokens(d_out.astype(q.dtype), plan.queries.num_rows)
    sums = {"lse": lse, "delta": delta}
    inputs = BackwardInputs(*padded, d_out=d_out, **sums, segments=segments)
    dq, dk, dv = static.gradients(inputs, plan)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _prepare(
    q, k, v, plan, scale, soft_cap, segment_ids, key_mask, implementation
) -> Any:
    """Returns static settings, arrays padded to whole tiles, segments and plan."""
    chosen = check_implementation(
        implementation, dtype=q.dtype.name, head_size=q.shape[-1]
    )
    options = Options(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(soft_cap),
    )
    lengths = plan.queries.num_rows, plan.keys.num_rows
    segments = _segments(segment_ids, key_mask, q.shape[:2], k.shape[:2])
    # The reference gathers blocks of any size.
    if chosen == "mosaic_gpu":
        check_plan(plan, head_size=q.shape[-1], segmented=segments is not None)
    if segments is not None:
        segments = tuple(map(_pad_tokens, segments, lengths))
    padded = (_pad_tokens(q, lengths[0]), *(_pad_tokens(x, lengths[1]) for x in (k, v)))
    return _Static(chosen, options), padded, segments, jax.tree.map(jnp.asarray, plan)


@dataclasses.dataclass(frozen=True)
class _Static:
    """Implementation and options: hashable, as static arguments of `custom_vjp` are."""

    implementation: str
    options: Options

    @property
    def passes(self):
        """Module of the implementation."""
        return load_implementation("sparse", self.implementation)

    def gradients(self, inputs, plan):
        """Returns the gradients of queries, keys and values."""
        dq = self.passes.backward_queries(inputs, plan.queries, self.options)
        return dq, *self.passes.backward_keys(inputs, plan.keys, self.options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Any, q: Any, k: Any, v: Any, segments: Any, plan: Any) -> Any:
    return static.passes.forward(q, k, v, segments, plan.queries, static.options)


def _attend_forward(static, q, k, v, segments, plan):
    """Returns the outputs and the residuals."""
    found: Any = _attend(static, q, k, v, segments, plan)
    # Named, so that a checkpoint policy can save outputs instead of a second pass.
    out, lse = (checkpoint_name(x, RESIDUALS) for x in found)
    return (out, lse), (q, k, v, out, lse, segments, plan)


def _attend_backward(static, residuals, cotangents):
    """Returns the cotangents of q, k and v."""
    q, k, v, out, lse, segments, plan = residuals
    d_out, d_lse = cotangents
    delta = jnp.einsum("bshd,bshd->bhs", out, d_out, preferred_element_type=jnp.float32)
    # d_scores = p * (d_p - delta + d_lse): d_lse is part of delta. Without keys p is 0,
    # but 0 times NaN is NaN.
    delta -= jnp.where(jnp.isneginf(lse), 0.0, d_lse)
    d_out = d_out.astype(q.dtype)
    inputs = BackwardInputs(q, k, v, d_out, lse, delta, segments)
    return *static.gradients(inputs, plan), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _segments(segment_ids, key_mask, queries, keys):
    """Returns int32 documents of queries and of keys, or None."""
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
            problem = "is not an integer dtype"
            raise invalid("segment_ids.dtype", x.dtype, problem, "number the documents")
    shapes = tuple(x.shape for x in segment_ids)
    if shapes != (queries, keys):
        problem = f"does not fit queries of shape {queries} and keys of shape {keys}"
        raise invalid("segment_ids.shape", shapes, problem, "give one number per token")
    for x in segment_ids:
        _check_segment_ids(x)
    query_ids, key_ids = (jnp.asarray(x, jnp.int32) for x in segment_ids)
    if key_mask is None:
        return query_ids, key_ids
    key_mask = key_mask if hasattr(key_mask, "dtype") else np.asarray(key_mask)
    if key_mask.dtype != bool:
        remedy = "give True for keys that are seen"
        raise invalid("key_mask.dtype", key_mask.dtype, "is not bool", remedy)
    if key_mask.shape != keys:
        problem = f"does not fit keys of shape {keys}"
        raise invalid("key_mask.shape", key_mask.shape, problem, "give one per key")
    # A hidden key is in a document without queries: kernels need no further mask.
    return query_ids, jnp.where(key_mask, key_ids, _NO_DOCUMENT)


def _check_segment_ids(ids):
    """Refuses concrete numbers that int32 cannot represent."""
    if isinstance(ids, Tracer):
        return
    # Under `jit`, operations on constants would be traced.
    with jax.ensure_compile_time_eval():
        ends = int(ids.min()), int(ids.max())
    if not _NO_DOCUMENT < ends[0] <= ends[1] <= _LAST_DOCUMENT:
        problem = f"is not from {-_LAST_DOCUMENT} to {_LAST_DOCUMENT}"
        raise invalid("segment_ids", ends, problem, "number the documents from 0")


def _pad_tokens(x, length):
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *rest])


def _check(q, k, v, plan, scale, soft_cap):
    """Refuses a plan or arrays that do not fit one another."""
    check_plan(plan)
    for name, x in (("q", q), ("k", k), ("v", v)):
        refuse(array_problems(name, x, "[batch, tokens, heads, channels]"))
    if q.dtype.name not in DTYPES:
        known = ", ".join(DTYPES)
        problem = "is not a supported dtype"
        raise invalid("q.dtype", q.dtype, problem, f"cast to one of {known}")
    if 0 in (q.shape[:1] + q.shape[-1:]):
        problem, remedy = (
            "has an empty batch or no channels",
            "give one or more of both",
        )
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
                f"is not {expected}, as the plan needs",
                "make a plan for this length and these heads, or pad the sequence",
            )
        if x.dtype != q.dtype:
            remedy = f"cast all to {q.dtype}"
            raise invalid(
                f"{name}.dtype", x.dtype, f"differs from that of q, {q.dtype}", remedy
            )
    _check_factors(scale, soft_cap)


def _check_gradients(q, d_out, lse, delta):
    """Refuses `d_out`, `lse` or `delta` of another shape than the queries need."""
    batch, length, heads, _ = q.shape
    sums = batch, heads, length
    for name, x, expected in (
        ("d_out", d_out, q.shape),
        ("lse", lse, sums),
        ("delta", delta, sums),
    ):
        refuse(array_problems(name, x, str(expected)))
        if x.shape != expected:
            problem = f"is not {expected}, as the queries need"
            raise invalid(f"{name}.shape", x.shape, problem, "give all queries")


def _check_factors(scale, soft_cap):
    """Refuses factors that are traced, no numbers, or out of range."""
    for name, x in (("scale", scale), ("soft_cap", soft_cap)):
        # Kernels have factors as constants.
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
    """Whether a value is a real number, or a scalar array of one."""
    if isinstance(x, jax.Array | np.ndarray):
        kinds = jnp.integer, jnp.floating
        return x.ndim == 0 and any(jnp.issubdtype(x.dtype, kind) for kind in kinds)
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
