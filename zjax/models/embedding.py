"""Token and position embedding, and the context that all blocks read."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.models import layers
from zjax.ops import attention, rotary, sparse
from zjax.ops import invariant as ordered
from zjax.ops.lookup import look_up
from zjax.ops.sparse import Window
from zjax.ops.tokens import take_tokens
from zjax.parallel import sequence, tensor
from zjax.settings import schema
from zjax.settings.mixture import layers_per_block, mixture_places, num_blocks
from zjax.sharding.activations import pin_tokens, pin_whole
from zjax.typing import ATTENTION_WINDOW, IGNORED


def make_window(
    config: schema.Model, batch: Mapping[str, Any], x: Float[Array, "B L M"]
) -> Window | None:
    """Makes the attention window that a batch asks for; None if the batch has none."""
    size = batch.get("schedule", {}).get(ATTENTION_WINDOW)
    if size is None:
        return None
    # Step values are float32 in a batch.
    window, length = Window(size.astype(jnp.int32)), x.shape[1]
    pattern = _pattern(config, x)
    if pattern is None or config.kind == "encoder":  # plans need a causal pattern
        return window
    make_plan = sparse.WindowPlans(
        pattern,
        sequence.num_kv_heads(config),
        config.head_size,
        segments=not {"segment_ids", "lengths"}.isdisjoint(batch),
    )
    return Window(window.size, None, make_plan).on_tokens(length)


def _pattern(config, x):
    """Returns the block pattern of the kernels that run; None without such kernels."""
    if pattern := sparse.sparse_of(config):
        return pattern
    return attention.window_pattern(
        config.attention_kernel,
        x.dtype,
        num_heads=tensor.laid_heads(config.num_heads, config.num_kv_heads)[0],
        head_size=config.head_size,
        length=x.shape[1],
    )


class Context(NamedTuple):
    """Inputs of every block besides the stream."""

    segment_ids: Array | None = None
    """int32[B, L]: document of each token; 0 is padding."""
    lengths: Array | None = None
    """int32[B]: number of tokens per row; padding follows."""
    rotation: tuple[Array, Array] | None = None
    """Cosines and sines of `ops.rotary`; None without rotary positions."""
    local_rotation: tuple[Array, Array] | None = None
    """Cosines and sines of sliding layers, if different from `rotation`."""
    positions: Array | None = None
    """int32[B, L], or [1, L] if equal for all rows: position of each token in the
    document."""
    window: Window | None = None
    """Keys that a token sees; None for all."""
    order: Int[Array, " L"] | None = None
    """Place of each token in the row, as ring attention arranges tokens (zigzag); None
    for 0, 1, ..."""
    trained: Bool[Array, "B L"] | None = None
    """Whether a trained target depends on the token; None for all."""
    token_mask: Bool[Array, "B L"] | None = None
    """Whether a token of a pass of generation counts; None for all, or where
    `segment_ids` or `lengths` tell."""
    experts: Int[Array, "*N G B L K"] | None = None
    """Experts of each token in place of the routers' choice, -1 for none, by block and
    by layer of a block; after `of_block` by layer alone. None lets routers choose."""
    states: Float[Array, "*S B L W"] | None = None
    """Stream of a teacher that each block shall reach, by block; after `of_block` of
    the block alone. None without such a teacher."""
    heads: tuple[Array, Array] | None = None
    """Queries and keys of a teacher whose attention each block shall reach, as
    `states`."""

    def of_block(self, number: Any) -> "Context":
        """Selects what block `number` reads."""
        given = self.experts, self.states, self.heads
        experts, states, heads = jax.tree.map(lambda x: x[number], given)
        return self._replace(experts=experts, states=states, heads=heads)

    def of_layer(self, number: int) -> "Context":
        """Selects what layer `number` of a block reads, as of a block of one layer."""
        if self.experts is None:
            return self
        return self._replace(experts=self.experts[number : number + 1])

    def take_tokens(self, indices: Int[Array, "B K"]) -> "Context":
        """Selects tokens of each row, at ascending indices."""
        assert self.experts is None  # no such policy drops tokens
        assert self.states is None and self.heads is None  # see config.check

        def take(x: Array) -> Array:
            # Arrays of one row hold for all rows.
            return x[0][indices] if x.shape[0] == 1 else take_tokens(x, indices)

        arrays = self.segment_ids, self.rotation, self.local_rotation, self.positions
        ids, rotation, local, positions = jax.tree.map(take, arrays)
        trained = jax.tree.map(take, self.trained)
        lengths = self.lengths
        if lengths is not None:
            places = indices if self.order is None else self.order[indices]
            num_tokens = jnp.sum(places < lengths[:, None], axis=1, dtype=jnp.int32)
            # A kernel may divide by the sum of no exponentials at all.
            lengths = jnp.maximum(num_tokens, 1)
        window = self.window
        if window is not None:
            window = window.on_tokens(indices.shape[1])
        # Without `order`: the subset lies in the order of the ring, as devices keep
        # equally many tokens.
        return Context(
            ids, lengths, rotation, local, positions, window, trained=trained
        )


class Embedding(nnx.Module):
    """Token table, with learned or rotary positions.

    Args:
        use_norm: Whether the sum of the embeddings is normalised, as in BERT.
        deterministic: Whether gradients of the tables are summed in a fixed order.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        use_norm: bool = False,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        def table(name: str | None, num_rows: int) -> nnx.Param:
            normal = layers.make_normal(rngs.params(), layers.INIT_STD)
            dims = ((name, num_rows), ("embed", config.embed_size))
            return layers.make_param(dims, normal)

        self.config = config
        self.deterministic = deterministic
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.tokens = table("vocab", config.vocab_size)
        num_positions = config.num_positions
        self.positions = table(None, num_positions) if num_positions else None
        num_types = config.num_token_types
        self.token_types = table(None, num_types) if num_types else None
        self.norm = layers.Norm(config) if use_norm else None

    def __call__(
        self, batch: dict[str, Any], key: jax.Array | None = None
    ) -> tuple[Float[Array, "B L M"], Context]:
        """Embeds batch["tokens"], and prepares the context of the blocks.

        Besides the arrays of a loss, `num_tokens` int32[B] is the length of a text that
        is being written, `num_given` int32[B] the length of the prompt, `token_mask`
        bool[B, L] is False for padding of a pass, and `schedule` has float32[] by name.
        The key is None in evaluation.
        """
        tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
        positions = batch.get("positions")
        if positions is None and segment_ids is not None:
            positions = positions_in_segments(segment_ids)
        order = sequence.token_order(tokens.shape[1], self.config)
        # Reordered tokens need explicit positions.
        if positions is None and order is not None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        arrange = functools.partial(sequence.arrange, config=self.config)
        tokens, segment_ids, positions = jax.tree.map(
            arrange, (tokens, segment_ids, positions)
        )
        x = tensor.look_up(self.tokens[...], tokens, self.deterministic)
        if self.config.scaled_embedding:
            # Gemma rounds the factor to the dtype of the stream, too.
            factor = jnp.asarray(self.config.embed_size**0.5, x.dtype)
            x = ordered.scale(x, factor) if self.invariant else x * factor
        if self.positions is not None:
            learned = self._learned_positions(positions, tokens.shape[1])
            x = layers.adder(invariant=self.invariant)(x, learned)
        if self.token_types is not None:
            types = batch.get("token_types")
            # Type 0 is added, not left out: checkpoints of BERT are trained with it.
            types = jnp.zeros_like(tokens) if types is None else arrange(types)
            x += self._look_up(self.token_types, types)
        x = x if self.norm is None else self.norm(x)
        rotation = local_rotation = None
        if isinstance(self.config.positions, schema.Rotary):
            counts = {name: batch.get(name) for name in ("num_tokens", "num_given")}
            rotations = self._rotations(positions, tokens.shape[1], **counts)
            rotation, local_rotation = rotations
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        context = Context(
            segment_ids,
            batch.get("lengths"),
            rotation,
            local_rotation,
            positions,
            make_window(self.config, batch, x),
            None if order is None else jnp.asarray(order),
            jax.tree.map(arrange, trained_tokens(batch, self.config)),
            batch.get("token_mask"),
            jax.tree.map(self._by_block, jax.tree.map(arrange, batch.get("experts"))),
            *self._of_teacher(batch.get("teacher", {}), arrange),
        )
        x = layers.dropout(x, self.config, key, self.config.embedding_dropout)
        return tensor.pin_stream(x), context

    def _of_teacher(self, teacher, arrange):
        """Lays streams, and queries with keys, of a teacher out by block."""
        names = {"states", "queries", "keys"} & teacher.keys()
        laid = {name: jnp.moveaxis(arrange(teacher[name]), 2, 0) for name in names}
        heads = (laid["queries"], laid["keys"]) if "queries" in laid else None
        return laid.get("states"), heads

    def _by_block(self, experts: Int[Array, "B L E K"]) -> Int[Array, "N G B L K"]:
        """Lays experts of mixtures out by block, and by layer of a block."""
        rows = np.zeros((num_blocks(self.config), layers_per_block(self.config)), int)
        for mixture, place in enumerate(mixture_places(self.config)):
            rows[place] = mixture
        return jnp.moveaxis(experts, 2, 0)[rows]

    def _look_up(self, table, indices) -> Any:
        """Looks up rows of a table, gathered where devices split sequences."""
        return look_up(pin_whole(table[...]), indices, self.deterministic)

    def _learned_positions(self, positions, length):
        """Returns embeddings of positions; refuses sequences longer than the table."""
        assert self.positions is not None
        longest = self.config.max_length
        first = self.config.num_positions - longest
        if length > longest:
            raise ConfigError(
                Problem(
                    "data.length",
                    length,
                    f"is longer than model.max_length={longest}",
                    "shorten the sequences or raise model.max_length",
                )
            )
        # Without packing all rows look up the same rows: a slice serves all.
        if positions is None:
            return self.positions[...][None, first : first + length]
        return self._look_up(self.positions, first + positions)

    def _rotations(self, positions, length, **counts):
        """Makes the tables of all layers, and of sliding layers if different."""
        config, settings = self.config, self.config.rotary
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)[None]

        def tables(theta, **scaling):
            size = settings.size or config.head_size
            cos, sin = rotary.make_rotary_tables(
                positions,
                head_size=size,
                theta=theta,
                invariant=self.invariant,
                **counts,
                **scaling,
            )
            return pin_tokens(cos), pin_tokens(sin)

        local = config.window.rope_theta if config.window else 0.0
        return (
            tables(settings.theta, scaling=settings.scaling),
            tables(local) if local else None,
        )


def trained_tokens(
    batch: dict[str, Any], config: schema.Model
) -> Bool[Array, "B L"] | None:
    """Finds the tokens on which a trained target depends, for the load of experts.

    Rows may be padded by targets of -100, or weights of 0, alone. In a decoder a target
    depends on the tokens before it, in an encoder on all tokens of the row.
    """
    names_padding = "segment_ids" in batch or "lengths" in batch
    if not config.moe or "targets" not in batch or names_padding:
        return None
    trained = batch["targets"] != IGNORED
    if "weights" in batch:
        trained &= batch["weights"] > 0
    if config.kind == "decoder":
        # A token counts if it or a later token has a target.
        return jax.lax.cummax(trained.astype(jnp.int32), axis=1, reverse=True) > 0
    return jnp.broadcast_to(trained.any(axis=1, keepdims=True), trained.shape)


def positions_in_segments(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Counts positions from the start of each document, a run of equal ids.

    Example:
        >>> positions_in_segments(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
        [[0, 1, 0, 1, 2, 0]]
    """
    index = jnp.broadcast_to(
        jnp.arange(segment_ids.shape[1], dtype=segment_ids.dtype)[None],
        segment_ids.shape,
    )
    # The value in front differs from the first id: column 0 starts a document.
    is_start = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    starts = jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    return index - starts
