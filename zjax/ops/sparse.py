"""Block-sparse attention over the devices of the mesh in use.

A pattern is laid out once, for the longest sequence; a shorter sequence uses the first
blocks of that layout, so that a token sees equal earlier tokens at any length. Plans
are made on the host, once per length.

Reference: DeepSpeed's sparse attention, which also slices one longest layout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

import zjax_kernels
from zjax.errors import ConfigError, Problem
from zjax.ops.abstract_attention import Pairs, abstract_attention
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import head_axes, open_size, row_axes
from zjax_kernels import BlockLayout, Pattern, Plan, SparsityConfig, abstract
from zjax_kernels.sparse import api
from zjax_kernels.sparse.arguments import Bits, integer_problems
from zjax_kernels.sparse.chunks import TILE

PlanMaker = Callable[[int, Int[Array, ""]], Plan]
"""`make_plan(length, size)` plans `length` tokens under a window; hashable."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Keys that a token sees, back from the position of the token.

    The size may be traced: one program runs all sizes. A window made outside of a loop
    over layers makes one plan for all layers.

    Args:
        size: int32[], number of keys, 1 or more.
        plan: Plan of the kernels for this size; None where other kernels run.
        make_plan: Function that plans another number of tokens; None where other
            kernels run.
    """

    size: Any  # JAX also builds windows of shapes or shardings
    plan: Any = None
    make_plan: PlanMaker | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def on_tokens(self, length: int) -> "Window":
        """Plans the window over another number of tokens."""
        if self.make_plan is None:
            return self
        plan = self.make_plan(length, self.size)
        return dataclasses.replace(self, plan=plan)


ATTENTION_OUTPUT = api.RESIDUALS
"""`checkpoint_name` of the results of the kernel."""

_PATTERNS = {
    "fixed": zjax_kernels.Fixed,
    "variable": zjax_kernels.Variable,
    "bigbird": zjax_kernels.BigBird,
    "bslongformer": zjax_kernels.BSLongformer,
    "local": zjax_kernels.LocalSlidingWindow,
    "dense": zjax_kernels.Dense,
}
_OPEN = ("num_random_blocks", -1), ("global_block_end_indices", ())
_MAX_PLANS = 64
"""Entries of the plan cache; the keys are lengths, heads and token masks."""


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A sparsity pattern and the longest sequence that it is laid out for.

    Args:
        pattern: Rule of live blocks; hashable.
        max_length: Number of tokens, 1 or more, rounded up to whole blocks.

    Raises:
        ConfigError: `pattern` is not a pattern, or `max_length` is below 1.
    """

    pattern: SparsityConfig
    max_length: int

    def __post_init__(self):
        """Refuses patterns that are not hashable, as plans are cached by pattern."""
        name, problems = "sparsity_config", []
        if not isinstance(self.pattern, SparsityConfig):
            problem = "is not a sparsity pattern"
            remedy = "give one like zjax_kernels.BigBird(num_heads=4), or an array as "
            remedy += "zjax_kernels.Custom"
            problems.append(Problem(name, self.pattern, problem, remedy))
        elif not _has_hash(self.pattern):
            problem, remedy = "is not hashable", "keep tuples in its fields, not arrays"
            problems.append(Problem(name, self.pattern, problem, remedy))
        if integer_problems("max_seq_length", self.max_length, 1):
            problem, remedy = "is not a number of tokens", "give 1 or more"
            problems.append(Problem("max_seq_length", self.max_length, problem, remedy))
        if problems:
            raise ConfigError(*problems)

    @property
    def block(self) -> int:
        """Tokens per side of a block."""
        return self.pattern.block


def sparse_of(config: schema.Model) -> Sparse | None:
    """Builds the pattern of a model's settings; `kind` sets the direction.

    None for dense attention.
    """
    if not isinstance(given := config.attention, schema.Sparse):
        return None
    settings = {
        name: value
        for name, value in vars(given.pattern).items()
        # -1 and () leave the defaults of the rule.
        if (name, value) not in _OPEN
    }
    causal = config.kind == "decoder"
    pattern = _PATTERNS[given.pattern.kind](
        num_heads=config.num_heads,
        block=given.block,
        attention="unidirectional" if causal else "bidirectional",
        **settings,
    )
    return Sparse(pattern, config.max_length)


def sparse_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    sparse: Sparse,
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    key_mask: Bool[Array, "B L"] | None = None,
    mask: Bool[np.ndarray, "L L"] | None = None,
    window: Window | None = None,
    spread: bool | None = None,
) -> Float[Array, "B L H D"]:
    """Computes softmax(q k / sqrt(D)) v over the keys in live blocks.

    Under `jax.set_mesh`, the batch is sharded over the batch axes and heads over the
    tensor and sequence axes, where they divide. L need not fill whole blocks. A query
    that sees no key gets 0.

    `mask` and `key_mask` are False where no query sees a key; plans are cached by the
    content of `mask`. A `window` needs a causal pattern. `spread` keeps tokens sharded
    over the sequence axis, and exchanges blocks between devices; it needs a multiple of
    128 tokens per device, and neither `mask` nor `window`. None spreads only if heads
    cannot be sharded over the sequence axis.

    Example:
        >>> sparse = Sparse(zjax_kernels.Fixed(2, attention="unidirectional"), 1024)
        >>> x = jnp.ones((1, 100, 2, 8))
        >>> sparse_attention(x, x, x, sparse).shape
        (1, 100, 2, 8)
    """
    if spread and mask is not None:
        problem, remedy = "cannot be used with spread=True", "use spread=False"
        raise ConfigError(Problem("mask", mask.shape, problem, remedy))
    if spread and window is not None:
        problem, remedy = "cannot be used with a window", "use spread=False"
        raise ConfigError(Problem("spread", True, problem, remedy))
    length, block = q.shape[1], sparse.block
    heads, problems = head_axes(k.shape[2]), [*_spread_problems(length)]
    if spread is None:
        is_free = mask is None and window is None
        spread = is_free and meshes.SEQUENCE not in heads and not problems
    if spread and problems:
        raise ConfigError(*problems)
    num_blocks = -(-length // block)
    layout = _layout(sparse)
    if num_blocks > layout.num_rows:
        problem = f"exceeds the {sparse.max_length} tokens of the layout"
        remedy = "shorten the sequence, or raise model.max_length or max_seq_length"
        raise ConfigError(Problem("length", length, problem, remedy))
    if abstract.is_abstract():
        share = live_fraction(sparse, length)
        return abstract_attention(q, k, v, Pairs(share, share), name=ATTENTION_OUTPUT)
    num_padding = num_blocks * block - length
    # Causal queries see no padding at the end, and a padded `mask` hides it.
    if num_padding and mask is None and not layout.causal:
        key_mask = jnp.ones(q.shape[:2], bool) if key_mask is None else key_mask
    masks = segment_ids, key_mask
    if spread:
        heads = tuple(axis for axis in heads if axis != meshes.SEQUENCE)
    sizes = {"num_kv_heads": k.shape[2], "head_size": q.shape[3]}
    segments = masks != (None, None)
    if window is None:
        plan: Any = _plan(
            sparse,
            num_blocks,
            num_devices=open_size(meshes.SEQUENCE) if spread else 0,
            segments=segments,
            # Bits are hashable, as keys of the plan cache must be.
            mask=None if mask is None else Bits.of(np.pad(mask, (0, num_padding))),
            head_shards=math.prod(map(open_size, heads)),
            **sizes,
        )
    else:
        plan = window.plan
        if plan is None:
            plan = WindowPlans(sparse, segments=segments, **sizes)(length, window.size)
    q, k, v, masks = jax.tree.map(
        lambda x: _pad_tokens(x, num_padding), (q, k, v, masks)
    )
    return _over_devices(q, k, v, masks, plan, heads)[:, :length]


@dataclasses.dataclass(frozen=True)
class WindowPlans:
    """Makes plans of a growing window, as a `zjax.ops.sparse.PlanMaker`.

    Hashable, since a `Window` holds it as static data.
    """

    sparse: Sparse
    num_kv_heads: int
    head_size: int
    segments: bool

    def __call__(self, length: int, size: Int[Array, ""]) -> zjax_kernels.Plan:
        """Plans `length` tokens under a window of `size` keys."""
        shards = math.prod(map(open_size, head_axes(self.num_kv_heads)))
        plan: Any = _plan(
            self.sparse,
            -(-length // self.sparse.block),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            segments=self.segments,
            head_shards=shards,
        )
        limit = zjax_kernels.limit_window
        # Plans of several head shards are stacked.
        return (limit if shards == 1 else jax.vmap(limit, (0, None)))(plan, size)


def visible_keys(
    sparse: Sparse, queries: Int[Array, "B L"], keys: Int[Array, "B S"]
) -> Bool[Array, "B H L S"]:
    """Computes which keys each query sees; keys at negative positions are hidden."""
    layout, block = _layout(sparse), sparse.block
    live = _live_rows(layout, queries // block)
    columns = keys[:, None, None] // block
    # Hidden keys have negative columns, whose values the next statement clears.
    seen = jnp.take_along_axis(live, columns, axis=3, mode="clip")
    seen &= keys[:, None, None] >= 0
    if layout.causal:
        seen &= (keys[:, None] <= queries[..., None])[:, None]
    return seen[:, jnp.array(layout.head_patterns)]


def live_fraction(sparse: Sparse, length: int) -> float:
    """Fraction of the pairs of `length` tokens with attention, over all heads."""
    num_blocks = -(-length // sparse.block)
    layout = _first_blocks(_layout(sparse), num_blocks)
    # Each block on the diagonal is half visible.
    half_block = 0.5 / num_blocks if layout.causal else 0.0
    return layout.density - half_block


def _spread_problems(length):
    """Yields the reasons why tokens cannot stay sharded over the sequence axis."""
    size, name = open_size(meshes.SEQUENCE), meshes.SEQUENCE
    unit = size * TILE
    if size == 1:
        problem = f"needs a mesh with several devices along {name!r}, left to the "
        problem += "compiler"
        yield Problem("spread", True, problem, "use spread=False")
    elif length % unit:
        problem = f"is not a multiple of {unit}, {TILE} tokens for each device along "
        problem += f"{name!r}"
        remedy = f"use {-(-length // unit) * unit}, or spread=False"
        yield Problem("length", length, problem, remedy)


def _has_hash(pattern):
    """Whether a pattern can be hashed: a dataclass with arrays cannot."""
    try:
        hash(pattern)
    except TypeError:
        return False
    return True


def _live_rows(layout, rows):
    """Live blocks of some block rows, per pattern: bool[B, patterns, L, columns]."""
    patterns, num_columns = layout.patterns, layout.num_columns
    counts = np.concatenate([np.diff(pattern.starts) for pattern in patterns])
    starts = jnp.array(np.cumsum([0, *counts]), jnp.int32)
    columns = np.concatenate([pattern.columns for pattern in patterns])
    # One entry beyond the end, which `look_up` drops.
    columns = jnp.array(np.append(columns, num_columns), jnp.int32)

    def look_up(row):
        entries = starts[row] + jnp.arange(counts.max())
        live_columns = jnp.where(
            entries < starts[row + 1], columns[entries], num_columns
        )
        return jnp.zeros(num_columns, bool).at[live_columns].set(True, mode="drop")

    first = jnp.arange(len(patterns))[None, :, None] * layout.num_rows
    return jnp.vectorize(look_up, signature="()->(n)")(first + rows[:, None])


@functools.cache
def _layout(sparse: Sparse) -> BlockLayout:
    """Lays a pattern out for the longest sequence."""
    num_blocks = -(-sparse.max_length // sparse.block)
    return sparse.pattern.layout(num_blocks * sparse.block)


@functools.lru_cache(_MAX_PLANS)
def _plan(
    sparse: Sparse,
    num_blocks: int,
    *,
    num_devices: int = 0,
    mask: Bits | None = None,
    **sizes: Any,
) -> zjax_kernels.Plan | zjax_kernels.SequencePlan:
    """Plans the first blocks of a pattern; 0 devices mean no sequence axis."""
    layout = _first_blocks(_layout(sparse), num_blocks)
    if num_devices:
        return zjax_kernels.make_sequence_plan(layout, num_devices, **sizes)
    # The mask was made hashable for the cache.
    tokens = None if mask is None else mask.array()
    return zjax_kernels.make_plan(layout, mask=tokens, **sizes)


def _first_blocks(layout: BlockLayout, num_blocks: int) -> BlockLayout:
    """Slices a layout to the first blocks."""

    def slice_pattern(pattern: Pattern) -> Pattern:
        rows, columns = pattern.rows, pattern.columns
        inside = (rows < num_blocks) & (columns < num_blocks)
        return Pattern.from_entries(
            rows[inside], columns[inside], num_blocks, num_blocks
        )

    if num_blocks == layout.num_rows:
        return layout
    patterns = tuple(map(slice_pattern, layout.patterns))
    return dataclasses.replace(
        layout, num_rows=num_blocks, num_columns=num_blocks, patterns=patterns
    )


def _pad_tokens(x, num_padding):
    """Pads tokens with zeros at the end."""
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, num_padding), *rest]) if num_padding else x


def _over_devices(q, k, v, masks, plan, heads):
    """Runs the kernel on the shard of each device: kernels cannot be partitioned."""
    tokens = (meshes.SEQUENCE,) if isinstance(plan, zjax_kernels.SequencePlan) else ()
    run: Any = api.sparse_attention
    if tokens:
        run = functools.partial(zjax_kernels.sequence_attention, axis=meshes.SEQUENCE)

    def attend(q, k, v, masks, plan) -> Any:
        segment_ids, key_mask = masks
        segment_pair = None if segment_ids is None else (segment_ids, segment_ids)
        return run(q, k, v, plan, segment_ids=segment_pair, key_mask=key_mask)

    mesh = jax.sharding.get_abstract_mesh()
    if meshes.num_shares(mesh, mesh.auto_axes) == 1:
        return attend(q, k, v, masks, plan)
    rows = row_axes(q.shape[0])
    plan_specs = jax.tree.map(lambda _: P((*tokens, *heads)), plan)
    if tokens:
        # Devices exchange blocks of all heads: sends have no dim of heads.
        plan_specs = dataclasses.replace(
            plan_specs, sends=(P(tokens),) * len(plan.sends)
        )
    head_spec = P(rows, tokens, heads)
    return jax.shard_map(
        attend,
        in_specs=(head_spec, head_spec, head_spec, P(rows, tokens), plan_specs),
        out_specs=head_spec,
        axis_names=set(mesh.auto_axes),
        check_vma=False,
    )(q, k, v, masks, jax.tree.map(jnp.asarray, plan))
