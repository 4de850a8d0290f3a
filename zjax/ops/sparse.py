"""Attention over the live blocks of a pattern, on every device of the mesh in use.

A pattern is laid out once, for the longest sequence that there may be; a shorter one
has the first blocks of that layout, so that a token sees the same ones whatever follows
it. Plans are made on the host, once per length.

Reference: DeepSpeed's sparse attention, which cuts its layouts from a longest one too.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

import zjax_kernels
from zjax.config import schema
from zjax.errors import ConfigError, Problem
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import head_axes, open_size, row_axes
from zjax_kernels import BlockLayout, Pattern, SparsityConfig
from zjax_kernels.sparse import api
from zjax_kernels.sparse.arguments import below
from zjax_kernels.sparse.bits import Bits
from zjax_kernels.sparse.cells import TILE

AVERAGES = api.SAVED
"""Name of what the kernel returns, for recomputation."""

_RULES = {
    "fixed": zjax_kernels.Fixed,
    "variable": zjax_kernels.Variable,
    "bigbird": zjax_kernels.BigBird,
    "bslongformer": zjax_kernels.BSLongformer,
    "local": zjax_kernels.LocalSlidingWindow,
    "dense": zjax_kernels.Dense,
}
_PLANS = 64
"""Plans that are kept: of lengths, heads, and masks of tokens."""


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A pattern and the longest sequence that it is laid out for.

    Args:
        pattern: Says which blocks live; hashable, as frozen dataclasses are.
        max_length: Tokens, 1 or more; the layout has whole blocks.

    Raises:
        ConfigError: It is no pattern, or no length.
    """

    pattern: SparsityConfig
    max_length: int

    def __post_init__(self):
        name, found = "sparsity_config", []
        if not isinstance(self.pattern, SparsityConfig):
            problem = "is no rule of live blocks"
            remedy = "give one like zjax_kernels.BigBird(num_heads=4), or an array as "
            remedy += "zjax_kernels.Custom"
            found.append(Problem(name, self.pattern, problem, remedy))
        elif not _has_hash(self.pattern):
            problem, remedy = "has no hash", "keep tuples in its fields, not arrays"
            found.append(Problem(name, self.pattern, problem, remedy))
        if below("max_seq_length", self.max_length, 1):
            problem, remedy = "is no number of tokens", "give 1 or more"
            found.append(Problem("max_seq_length", self.max_length, problem, remedy))
        if found:
            raise ConfigError(*found)

    @property
    def block(self) -> int:
        """Tokens per block and side."""
        return self.pattern.block


def sparse_of(config: schema.Model) -> Sparse:
    """The pattern that a model asks for.

    Args:
        config: Checked settings; `sparsity` is read, the heads, the kind of model, for
            the direction, and `max_length`.

    Returns:
        The pattern and its length.

    Example:
        >>> config = schema.Model(attention="sparse", num_heads=2)
        >>> sparse_of(config).pattern.attention
        'unidirectional'
    """
    given = dataclasses.asdict(config.sparsity)
    rule = _RULES[given.pop("mode")]
    if given["num_random_blocks"] == -1:
        del given["num_random_blocks"]
    given["global_block_end_indices"] = given["global_block_end_indices"] or None
    known = {field.name for field in dataclasses.fields(rule)}
    causal = config.kind == "decoder"
    pattern = rule(
        num_heads=config.num_heads,
        attention="unidirectional" if causal else "bidirectional",
        **{name: value for name, value in given.items() if name in known},
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
    spread: bool | None = None,
) -> Float[Array, "B L H D"]:
    """Averages the values by softmax(q k / sqrt(D)) over the keys in live blocks.

    Rows of the batch are split over the batch axes of the mesh set by `jax.set_mesh`,
    and heads over its tensor and sequence axes, where they divide.

    Args:
        q: Queries; H is that of the pattern and a multiple of K.
        k: Keys.
        v: Values.
        sparse: The pattern; L is at most its length, and need not be whole blocks.
        segment_ids: Document of each token, 0 or more; documents do not see each other.
        key_mask: False for keys that none sees, such as padding.
        mask: False where a query does not see a key, besides the pattern; a plan is
            kept for what it holds.
        spread: Whether tokens stay on the devices of the sequence axis, which then send
            each other the blocks that others see. Each has a multiple of 128 tokens,
            and there is no mask. None: where these devices cannot share the heads.

    Returns:
        One average per query and head, 0 where a query sees no key.

    Raises:
        ConfigError: The sequence is longer than the layout, or tokens that are to stay
            are in no such parts.

    Example:
        >>> sparse = sparse_of(schema.Model(num_heads=2, num_kv_heads=2))
        >>> x = jnp.ones((1, 100, 2, 8))
        >>> sparse_attention(x, x, x, sparse).shape
        (1, 100, 2, 8)
    """
    if spread and mask is not None:
        problem, remedy = "cannot be used with spread=True", "use spread=False"
        raise ConfigError(Problem("mask", mask.shape, problem, remedy))
    length, block = q.shape[1], sparse.block
    heads, problems = head_axes(k.shape[2]), [*_parts_problems(length)]
    if spread is None:
        spread = mask is None and meshes.SEQUENCE not in heads and not problems
    if spread and problems:
        raise ConfigError(*problems)
    num_blocks = -(-length // block)
    layout = _layout(sparse)
    if num_blocks > layout.num_rows:
        problem = f"exceeds the {sparse.max_length} tokens of the layout"
        remedy = "shorten the sequence, or raise model.max_length or max_seq_length"
        raise ConfigError(Problem("length", length, problem, remedy))
    missing = num_blocks * block - length
    if missing and mask is None and not layout.causal:
        key_mask = jnp.ones(q.shape[:2], bool) if key_mask is None else key_mask
    masks = segment_ids, key_mask
    if spread:
        heads = tuple(axis for axis in heads if axis != meshes.SEQUENCE)
    plan = _plan(
        sparse,
        num_blocks,
        num_devices=open_size(meshes.SEQUENCE) if spread else 0,
        num_kv_heads=k.shape[2],
        head_size=q.shape[3],
        segments=masks != (None, None),
        mask=None if mask is None else Bits.of(np.pad(mask, (0, missing))),
        head_shares=math.prod(map(open_size, heads)),
    )
    q, k, v, masks = jax.tree.map(lambda x: _lengthen(x, missing), (q, k, v, masks))
    return _over_devices(q, k, v, masks, plan, heads)[:, :length]


def visible_keys(
    sparse: Sparse, queries: Int[Array, "B L"], keys: Int[Array, "B S"]
) -> Bool[Array, "B H L S"]:
    """Which keys some queries see: the pattern token by token.

    Args:
        sparse: A pattern.
        queries: Positions of the queries, from 0 to below its length.
        keys: Positions of the keys; none sees those below 0.

    Returns:
        True where a query sees a key.

    Example:
        >>> sparse = sparse_of(schema.Model(num_heads=2, num_kv_heads=2))
        >>> positions = jnp.arange(4)[None]
        >>> visible_keys(sparse, positions, positions)[0, 0].sum(1).tolist()
        [1, 2, 3, 4]
    """
    layout, block = _layout(sparse), sparse.block
    live = _live_rows(layout, queries // block)
    columns = keys[:, None, None] // block
    seen = jnp.take_along_axis(live, columns, axis=3, mode="clip")
    seen &= keys[:, None, None] >= 0
    if layout.causal:
        seen &= (keys[:, None] <= queries[..., None])[:, None]
    return seen[:, jnp.array(layout.head_patterns)]


def live_share(sparse: Sparse, length: int) -> float:
    """Share of all pairs of tokens that see each other, over all heads.

    Args:
        sparse: A pattern.
        length: Tokens per sequence, at most its length.

    Returns:
        More than 0, and half for a causal pattern of all blocks.

    Example:
        >>> model = schema.Model(sparsity=schema.Sparsity(mode="dense"))
        >>> live_share(sparse_of(model), 1024)
        0.5
    """
    num_blocks = -(-length // sparse.block)
    layout = _first_blocks(_layout(sparse), num_blocks)
    cut = 0.5 / num_blocks if layout.causal else 0.0
    return layout.density - cut


def _parts_problems(length):
    """Finds why tokens cannot stay on the devices of the sequence axis."""
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
    try:
        hash(pattern)
    except TypeError:
        return False
    return True


def _live_rows(layout, rows):
    """Which blocks some rows see in each pattern: bool[B, patterns, L, columns]."""
    patterns, num_columns = layout.patterns, layout.num_columns
    counts = np.concatenate([np.diff(pattern.starts) for pattern in patterns])
    starts = jnp.array(np.cumsum([0, *counts]), jnp.int32)
    columns = np.concatenate([pattern.columns for pattern in patterns])
    columns = jnp.array(np.append(columns, num_columns), jnp.int32)

    def look_up(row):
        entries = starts[row] + jnp.arange(counts.max())
        found = jnp.where(entries < starts[row + 1], columns[entries], num_columns)
        return jnp.zeros(num_columns, bool).at[found].set(True, mode="drop")

    first = jnp.arange(len(patterns))[None, :, None] * layout.num_rows
    return jnp.vectorize(look_up, signature="()->(n)")(first + rows[:, None])


@functools.cache
def _layout(sparse: Sparse) -> BlockLayout:
    num_blocks = -(-sparse.max_length // sparse.block)
    return sparse.pattern.layout(num_blocks * sparse.block)


@functools.lru_cache(_PLANS)
def _plan(
    sparse: Sparse,
    num_blocks: int,
    *,
    num_devices: int = 0,
    mask: Bits | None = None,
    **sizes: Any,
) -> zjax_kernels.Plan | zjax_kernels.SequencePlan:
    layout = _first_blocks(_layout(sparse), num_blocks)
    if num_devices:
        return zjax_kernels.make_sequence_plan(layout, num_devices, **sizes)
    tokens = None if mask is None else mask.array()
    return zjax_kernels.make_plan(layout, mask=tokens, **sizes)


def _first_blocks(layout: BlockLayout, num_blocks: int) -> BlockLayout:
    def cut(pattern: Pattern) -> Pattern:
        rows, columns = pattern.rows, pattern.columns
        kept = (rows < num_blocks) & (columns < num_blocks)
        return Pattern.from_entries(rows[kept], columns[kept], num_blocks, num_blocks)

    if num_blocks == layout.num_rows:
        return layout
    patterns = tuple(map(cut, layout.patterns))
    return dataclasses.replace(
        layout, num_rows=num_blocks, num_columns=num_blocks, patterns=patterns
    )


def _lengthen(x, missing):
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, missing), *rest]) if missing else x


def _over_devices(q, k, v, masks, plan, heads):
    """Kernels have no rule of partition: each device is given its share of all."""
    tokens = (meshes.SEQUENCE,) if isinstance(plan, zjax_kernels.SequencePlan) else ()
    run: Any = api.sparse_attention
    if tokens:
        run = functools.partial(zjax_kernels.sequence_attention, axis=meshes.SEQUENCE)

    def attend(q, k, v, masks, plan) -> Any:
        segment_ids, key_mask = masks
        both = None if segment_ids is None else (segment_ids, segment_ids)
        return run(q, k, v, plan, segment_ids=both, key_mask=key_mask)

    mesh = jax.sharding.get_abstract_mesh()
    if meshes.num_shares(mesh, mesh.auto_axes) == 1:
        return attend(q, k, v, masks, plan)
    rows = row_axes(q.shape[0])
    of_plan = jax.tree.map(lambda _: P((*tokens, *heads)), plan)
    if tokens:
        of_plan = dataclasses.replace(of_plan, sends=(P(tokens),) * len(plan.sends))
    of_heads = P(rows, tokens, heads)
    return jax.shard_map(
        attend,
        in_specs=(of_heads, of_heads, of_heads, P(rows, tokens), of_plan),
        out_specs=of_heads,
        axis_names=set(mesh.auto_axes),
        check_vma=False,
    )(q, k, v, masks, jax.tree.map(jnp.asarray, plan))
