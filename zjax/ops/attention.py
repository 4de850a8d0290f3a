"""Scaled dot-product attention on cuDNN or XLA, or on zjax's kernels under a window.

`choose_implementation` decides from shapes, dtype and device; the choice is logged
once. An implementation requested by name never falls back to another implementation.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.ops import sparse
from zjax.ops.abstract_attention import Pairs, abstract_attention
from zjax.ops.explicit_attention import Dropout, explicit_attention, score_bytes
from zjax.ops.sparse import Window
from zjax.sharding.activations import head_axes, row_axes
from zjax_kernels import Dense, abstract
from zjax_kernels.device import first_device, why_unsupported

Implementation = Literal["auto", "cudnn", "xla"]
Chosen = Literal["cudnn", "xla", "mosaic_gpu"]
"""Kernels that run; `mosaic_gpu` are the kernels of `zjax_kernels`."""

_WITH_FLOAT16 = ("cuda", "rocm")
"""Platforms that multiply float16."""
_BLOCK = 128
"""Tokens per side of the blocks of attention under a window."""

ATTENTION_OUTPUT = "attention"
"""`checkpoint_name` of the attention output, before the output projection."""


class Bounds(NamedTuple):
    """Static limits of attention in a layer."""

    window: int = 0
    """Number of keys that a query sees, back from the position of the query; 0 for
    all."""
    soft_cap: float = 0.0
    """Bound of the scores, which cuDNN lacks; 0 for none."""


UNBOUNDED = Bounds()


def dot_product_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    causal: bool,
    segment_ids: Int[Array, "B L"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    mask: Bool[Array, "B L S"] | None = None,
    window: Window | None = None,
    bounds: Bounds = UNBOUNDED,
    dropout: Dropout | None = None,
    sinks: Float[Array, " H"] | None = None,
    implementation: Implementation = "auto",
    value_size: int = 0,
) -> Float[Array, "B L H D"]:
    """Computes softmax(q k / sqrt(D)) v, with the softmax in float32.

    H is a multiple of K (grouped-query attention). Masks combine: `mask` is True where
    a query sees a key, `segment_ids` hide documents from one another, and tokens from
    `lengths` on are padding. On cuDNN, `segment_ids`, `mask` and `window` become an
    additive bias that visits all pairs; `causal` and `lengths` are free there: prefer
    both. cuDNN slides windows of a static size only.

    `sinks` add a score per head that takes part in the softmax and has no value. Soft
    caps, dropout and sinks run on XLA. Values have `value_size` channels, then padding,
    which counts as no FLOPs; 0 means no padding.

    Reference:
        Vaswani et al. (arXiv:1706.03762); grouped queries: Ainslie et al.
        (arXiv:2305.13245).
    """
    if (window is not None or bounds.window) and not causal:
        problem, remedy = "does not fit a window, which looks back", "use causal=True"
        raise ConfigError(Problem("causal", causal, problem, remedy))
    if abstract.is_abstract():
        size = bounds.window
        kept = _share_in_window(size, q.shape[1]) if size else 1.0
        has_scores = _has_scores(implementation, q, k, bounds, dropout, sinks)
        stored = {"capped": bounds.soft_cap > 0, "dropped": dropout is not None}
        num_bytes = score_bytes(q.dtype, **stored) if has_scores else 0
        pairs = Pairs(kept, kept / 2 if causal else kept, num_bytes)
        named = {"name": ATTENTION_OUTPUT, "value_size": value_size}
        return abstract_attention(q, k, v, pairs, **named)
    # The kernels take segments, but no mask of the caller.
    free_mask, mask = mask, _combine(mask, segment_ids)
    platform, capability = first_device()
    chosen, reason = choose_implementation(
        implementation,
        platform=platform,
        compute_capability=capability,
        dtype=q.dtype.name,
        head_size=q.shape[-1],
        lengths=(q.shape[1], k.shape[1]),
        masked=mask is not None or window is not None,
        windowed=window is not None and free_mask is None and not bounds.window,
        sliding=bounds.window > 0,
        capped=bounds.soft_cap > 0,
        dropped=dropout is not None,
        has_sinks=sinks is not None,
    )
    _log_choice(chosen, reason)
    if chosen == "mosaic_gpu":
        return _attend_window(q, k, v, segment_ids, lengths, window)
    if window is not None:
        mask = _near(window.size, q.shape[1], k.shape[1], mask)

    def attend(q: Any, k: Any, v: Any, mask: Any, lengths: Any) -> jax.Array:
        return call_jax(
            q,
            k,
            v,
            mask=mask,
            is_causal=causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=chosen,
            bounds=bounds,
            dropout=dropout,
            sinks=sinks,
        )

    if chosen == "xla":
        return checkpoint_name(attend(q, k, v, mask, lengths), ATTENTION_OUTPUT)
    # JAX's cuDNN rule names its own residuals: the output and the softmax sums.
    return _over_devices(attend, q, k, v, mask, lengths)


def call_jax(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    bounds: Bounds = UNBOUNDED,
    dropout: Dropout | None = None,
    sinks: Float[Array, " H"] | None = None,
    **options: Any,
) -> Float[Array, "B L H D"]:
    """Calls `jax.nn.dot_product_attention`, in float32 for float16 on CPUs and TPUs.

    Soft caps, dropout and sinks take `explicit_attention` instead.
    """
    arrays = q, k, v
    # Compilers for CPUs refuse products of float16 with sums in float32.
    if q.dtype == jnp.float16 and first_device()[0] not in _WITH_FLOAT16:
        arrays = (x.astype(jnp.float32) for x in arrays)
    if bounds.window:
        # JAX counts keys besides the position of the query.
        options["local_window_size"] = (bounds.window - 1, 0)
    attend = jax.nn.dot_product_attention
    if bounds.soft_cap or dropout is not None or sinks is not None:
        given = {"cap": bounds.soft_cap, "dropout": dropout, "sinks": sinks}
        attend = functools.partial(explicit_attention, **given)
    return attend(*arrays, **options).astype(q.dtype)


def choose_implementation(
    requested: Implementation,
    *,
    platform: str,
    compute_capability: tuple[int, int],
    dtype: str,
    head_size: int,
    lengths: tuple[int, int],
    masked: bool,
    windowed: bool = False,
    sliding: bool = False,
    capped: bool = False,
    dropped: bool = False,
    has_sinks: bool = False,
) -> tuple[Chosen, str]:
    """Chooses the kernel that runs, and returns the reason to log.

    `lengths` are the numbers of queries and keys. `masked` means a mask besides
    causality and row lengths, `windowed` a traced window without a mask of the caller,
    `sliding` a static window. A requested `cudnn` that cannot run is refused.
    """
    if requested == "xla":
        return "xla", "asked for"
    lacks = {
        "soft cap of scores": capped,
        "dropout of attention weights": dropped,
        "score without a key": has_sinks,
    }
    if lacking := next((name for name, is_used in lacks.items() if is_used), ""):
        if requested == "auto":
            return "xla", f"cudnn has no {lacking}"
        problem, remedy = f"cannot run: it has no {lacking}", "use 'xla'"
        raise ConfigError(Problem("model.attention", "cudnn", problem, remedy))
    if windowed and requested == "auto":
        device = platform, compute_capability
        obstacle = why_unsupported(dtype, head_size, device)
        if not obstacle:
            # Only with `auto`: cuDNN by name never falls back.
            return "mosaic_gpu", f"window, {dtype}, head size {head_size}"
    obstacle, remedy = _cudnn_obstacle(
        platform, compute_capability, dtype, head_size, lengths, masked
    )
    if not obstacle and sliding and masked:
        obstacle, remedy = "slides windows under no other mask", "use 'auto' or 'xla'"
    if not obstacle:
        return "cudnn", f"{dtype}, head size {head_size}"
    if requested == "cudnn":
        raise ConfigError(
            Problem("model.attention", "cudnn", f"cannot run: it {obstacle}", remedy)
        )
    return "xla", f"cudnn {obstacle}"


def _cudnn_obstacle(platform, capability, dtype, head_size, lengths, masked):
    """Finds why cuDNN cannot run and the remedy; empty texts if cuDNN can run."""
    # Limits of cuDNN's fused attention.
    largest_head = 256 if capability >= (9, 0) else 128
    other = "use 'auto' or 'xla'"
    if platform != "cuda":
        return f"needs an NVIDIA GPU and this is {platform}", other
    if capability < (8, 0):
        version = ".".join(map(str, capability))
        return f"needs compute capability 8.0 and this GPU has {version}", other
    if dtype not in ("bfloat16", "float16"):
        remedy = f"set precision.compute_dtype to bfloat16 or float16, or {other}"
        return f"needs bfloat16 or float16 and the activations are {dtype}", remedy
    if head_size % 8 or head_size > largest_head:
        remedy = f"change model.embed_size or model.num_heads, or {other}"
        problem = f"needs a head size that is a multiple of 8 up to {largest_head}"
        return f"{problem} and this is {head_size}", remedy
    if masked and (lengths[0] % 2 or lengths[1] % 2):
        odd = next(length for length in lengths if length % 2)
        remedy = f"use an even data.length, or {other}"
        return f"needs even lengths under a mask and this is {odd}", remedy
    return "", ""


def _over_devices(attend, q, k, v, mask, lengths):
    """Runs `attend` on the rows and heads of each device.

    JAX's partitioning rule for cuDNN fails inside a `shard_map` over other axes.
    """
    axes = jax.sharding.get_abstract_mesh().auto_axes
    if not axes:
        return attend(q, k, v, mask, lengths)
    rows = row_axes(q.shape[0])
    head_spec = P(rows, None, head_axes(k.shape[2]))
    mask_spec = P() if mask is not None and mask.shape[0] == 1 else P(rows)
    return jax.shard_map(
        attend,
        in_specs=(head_spec, head_spec, head_spec, mask_spec, P(rows)),
        out_specs=head_spec,
        axis_names=set(axes),
        check_vma=False,
    )(q, k, v, mask, lengths)


def window_pattern(
    requested: Implementation,
    dtype: Any,
    *,
    num_heads: int,
    head_size: int,
    length: int,
) -> sparse.Sparse | None:
    """Pattern on which zjax's kernels run attention under a window, else None."""
    platform, capability = first_device()
    chosen, _ = choose_implementation(
        requested,
        platform=platform,
        compute_capability=capability,
        dtype=jnp.dtype(dtype).name,
        head_size=head_size,
        lengths=(length, length),
        masked=True,
        windowed=True,
    )
    return _dense(num_heads, length) if chosen == "mosaic_gpu" else None


def _dense(num_heads, length):
    """Causal pattern of all blocks."""
    pattern = Dense(num_heads=num_heads, block=_BLOCK, attention="unidirectional")
    return sparse.Sparse(pattern, length)


def _attend_window(q, k, v, segment_ids, lengths, window):
    """Attends on zjax's kernels, which visit only the blocks of the window."""
    key_mask = None
    if lengths is not None:
        tokens = jnp.arange(q.shape[1], dtype=lengths.dtype)
        key_mask = tokens[None] < lengths[:, None]
    masks = {"segment_ids": segment_ids, "key_mask": key_mask}
    layout = _dense(q.shape[2], q.shape[1])
    return sparse.sparse_attention(q, k, v, layout, window=window, **masks)


def _share_in_window(size: int, length: int) -> float:
    """Share of the pairs of a causal row that a sliding window leaves."""
    size = min(size, length)
    # The first tokens of a row see less than a window.
    pairs = size * length - size * (size - 1) / 2
    return pairs / (length * (length + 1) / 2)


def _has_scores(implementation, q, k, bounds, dropout, sinks):
    """Whether no kernel fits even a recent GPU: plans are made without GPUs."""
    kernel, _ = choose_implementation(
        "auto" if implementation == "cudnn" else implementation,
        platform="cuda",
        compute_capability=(9, 0),
        dtype=q.dtype.name,
        head_size=q.shape[-1],
        lengths=(q.shape[1], k.shape[1]),
        masked=False,
        capped=bounds.soft_cap > 0,
        dropped=dropout is not None,
        has_sinks=sinks is not None,
    )
    return kernel == "xla" and implementation != "cudnn"


def _near(window, num_queries, num_keys, mask):
    """Adds a window to a mask, bool[B or 1, 1, L, S] or None."""
    back = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None]
    near = (back < window)[None, None]
    return near if mask is None else mask & near


def _combine(mask, segment_ids):
    """Hides other documents from `mask`, and adds a dim of heads."""
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = same if mask is None else mask & same
    return None if mask is None else mask[:, None, :, :]


@functools.cache
def _log_choice(chosen: str, reason: str) -> None:
    """Logs a choice, once per choice and reason."""
    logging.warning("attention: %s (%s)", chosen, reason)
