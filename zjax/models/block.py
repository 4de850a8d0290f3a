"""Transformer block of the built-in models, and segments of equal blocks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zjax.models import layers
from zjax.models.embedding import Context, positions_in_segments
from zjax.models.feed_forward import FeedForward, TiledFeedForward
from zjax.models.latent import LatentAttention
from zjax.models.mixture import MixtureOfExperts
from zjax.ops import attention, remat, sparse
from zjax.ops.explicit_attention import Dropout
from zjax.ops.invariant_attention import attend_to_rows, scores_of
from zjax.ops.keys import fold_in, fold_name
from zjax.parallel import tensor
from zjax.parallel.sequence import by_chunks, sequence_attention
from zjax.settings import mixture, schema
from zjax.stack.forward import combine
from zjax.typing import Auxiliary, RecordExperts


class Activations(NamedTuple):
    """Activations of a block that tell how important heads and channels are."""

    attention_input: Float[Array, "B L M"]
    heads: Float[Array, "B L H D"]
    """Outputs of the heads."""
    mlp_input: Float[Array, "B L M"]
    hidden: Float[Array, "B L F"] | None
    """Hidden channels of the feed-forward; None for a mixture."""
    experts: Float[Array, "B L E"] | None
    """1 for the experts that a token chooses; None without a mixture."""


class Block(nnx.Module):
    """Attention and feed-forward around a residual stream.

    Args:
        causal: Whether a token sees no later token.
        norm_position: Place of the norms: `input` normalises the input of attention and
            feed-forward (GPT-2, Llama), `output` the terms added to the stream (OLMo
            2), `both` the two (Gemma 2), `stream` the sum (BERT). Except under
            `stream`, matrices that write to the stream are initialised smaller, by the
            square root of the number of such matrices, as in GPT-2.
        layer: Kind of the layer among the layers of the model.
        matmul_dtype: Dtype of the operands of projections and feed-forward.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        causal: bool,
        norm_position: Literal["input", "output", "both", "stream"],
        layer: mixture.Layer,
        matmul_dtype: layers.MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.causal = causal
        self.norm_position = norm_position
        # A window of 0 bounds nothing.
        self.bounds = attention.Bounds(
            config.window_size if layer.slides else 0, config.attention_soft_cap
        )
        self.rotates = layer.rotates
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.sparse = sparse.sparse_of(config)
        self.implementation: attention.Implementation = config.attention_kernel
        self.on_heads: Callable[[jax.Array, jax.Array], None] | None = None
        """Function that is told queries and keys, while a full sequence is traced."""
        num_writers = 1 if norm_position == "stream" else 2 * config.num_layers
        out_std = layers.INIT_STD / num_writers**0.5
        self.attention_norm = layers.Norm(config)
        options = {"out_std": out_std, "matmul_dtype": matmul_dtype, "rngs": rngs}
        if config.latent:
            self.attention = LatentAttention(config, config.latent, **options)
        else:
            self.attention = layers.Attention(config, **options)
        self.mlp_norm = layers.Norm(config)
        has_both = norm_position == "both"
        self.attention_output_norm = layers.Norm(config) if has_both else None
        self.mlp_output_norm = layers.Norm(config) if has_both else None
        if config.moe and layer.num_experts:
            self.mlp = MixtureOfExperts(
                config, config.moe, layer.num_experts, **options
            )
        elif config.mlp_tiles > 1:
            self.mlp = TiledFeedForward(config, **options)
        else:
            self.mlp = FeedForward(config, **options)

    def __call__(
        self, x: Float[Array, "B L M"], context: Context, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B L M"], Auxiliary]:
        """Transforms the stream; the key is None in evaluation."""
        if self.invariant and isinstance(self.mlp, TiledFeedForward):
            return self._add_tiles(self.mlp, x, context, key), Auxiliary()
        attend, dropout = self._make_attend(context, key), None
        if key is not None:
            dropout = layers.AdapterDropout(key, self.config)
        x, _ = self._attend(attend, x, context, _keys(key)[0], dropout)
        y, auxiliary = self._norm_input(self.mlp_norm, x), Auxiliary()
        if isinstance(self.mlp, MixtureOfExperts):
            # A key apart from dropout's: `_keys` splits `key` itself.
            router_key = None if key is None else fold_name(key, "router")
            counts = token_mask(context, y)
            how = {"trained": context.trained, "adapter_dropout": dropout}
            how["given"] = None if context.experts is None else context.experts[0]
            y, auxiliary = self.mlp(y, counts, router_key, **how)
        else:
            run_mlp = functools.partial(self.mlp, adapter_dropout=dropout)
            y = by_chunks(run_mlp, y, self.config.mlp_chunk_tokens)
        return self._add_mlp(x, y, _keys(key)[1]), auxiliary

    def continue_with(
        self,
        attend: layers.Attend,
        x: Float[Array, "B L M"],
        context: Context,
        record: RecordExperts | None = None,
    ) -> tuple[Float[Array, "B L M"], Any]:
        """Transforms the stream with a given attention; returns stream and cache.

        Only rotation and token mask of the context are read. Experts drop no tokens, so
        that the text of a row does not depend on other rows. A mixture tells `record`
        the experts of each token.
        """
        x, cache = self._attend(attend, x, context, None)
        y = self._norm_input(self.mlp_norm, x)
        if isinstance(self.mlp, MixtureOfExperts):
            y, _ = self.mlp(y, context.token_mask, drops=False, record=record)
        else:
            y = self.mlp(y)
        return self._add_mlp(x, y, None), cache

    def chosen_experts(
        self, x: Float[Array, "B L M"], context: Context
    ) -> Int[Array, "B L K"]:
        """Returns each token's experts in evaluation, for a block with a mixture."""
        assert isinstance(self.mlp, MixtureOfExperts)
        x, _ = self._attend(self._make_attend(context), x, context, None)
        return self.mlp.chosen_experts(self._norm_input(self.mlp_norm, x))

    def activations(
        self, x: Float[Array, "B L M"], context: Context
    ) -> tuple[Float[Array, "B L M"], "Activations"]:
        """Transforms the stream in evaluation, and returns what the matrices read."""
        heads = list[jax.Array]()

        def attend(q, k, v, stored):
            outputs, cache = self._make_attend(context)(q, k, v, stored)
            heads.append(outputs)
            return outputs, cache

        middle, _ = self._attend(attend, x, context, None)
        read = self._norm_input(self.mlp_norm, middle)
        hidden = load = None
        if isinstance(self.mlp, MixtureOfExperts):
            chosen = self.mlp.chosen_experts(read)
            load = jax.nn.one_hot(chosen, self.mlp.settings.num_experts).sum(2)
        else:
            assert isinstance(self.mlp, FeedForward)
            hidden = self.mlp.hidden(read)
        first = self._norm_input(self.attention_norm, x)
        output, _ = self.continue_with(self._make_attend(context), x, context)
        return output, Activations(first, heads[0], read, hidden, load)

    def trunk(
        self, x: Float[Array, "B L M"], context: Context, key: jax.Array | None
    ) -> tuple[Float[Array, "B L M"], Float[Array, "B L M"]]:
        """Runs the block without the tiles of the feed-forward.

        Returns the stream, to which the caller adds `run_tile` of each tile, and the
        input of all tiles.
        """
        return self.trunk_with(self._make_attend(context, key), x, context, key)[0]

    def trunk_with(
        self,
        attend: layers.Attend,
        x: Float[Array, "B L M"],
        context: Context,
        key: jax.Array | None = None,
    ) -> tuple[tuple[Float[Array, "B L M"], Float[Array, "B L M"]], Any]:
        """Runs the trunk with a given attention; also returns the cache."""
        x, cache = self._attend(attend, x, context, _keys(key)[0])
        # Tiles are refused with any other `norm_position` than `input`.
        mlp_input = self.mlp_norm(x)
        assert isinstance(self.mlp, TiledFeedForward)
        if self.mlp.down is not None:
            # The bias of the sum of all tiles, dropped like the tiles.
            bias = self.mlp.down(jnp.zeros_like(x))
            bias = layers.dropout(bias, self.config, _keys(key)[1])
            x = layers.adder(invariant=self.invariant)(x, bias)
        return (x, mlp_input), cache

    def _add_tiles(self, mlp, x, context, key):
        """Adds tiles to the stream one by one, as separate programs and passes do."""
        x, entering = self.trunk(x, context, key)
        add = layers.adder(invariant=self.invariant)
        for number in range(len(mlp.tiles)):
            tile = mlp.tiles[str(number)]
            x = add(x, run_tile(tile, entering, key, config=self.config))
        return x

    def _make_attend(self, context, key=None):
        """Returns the attention of a full sequence, which has no cache."""
        ids, lengths = context.segment_ids, context.lengths
        dropout = self._make_dropout(key)

        def attend(q, k, v, _):
            if self.on_heads is not None:
                self.on_heads(q, k)
            outputs = sequence_attention(
                functools.partial(self._attend_full, dropout=dropout),
                *(q, k, v),
                self.config,
                segment_ids=ids,
                lengths=lengths,
                window=context.window,
            )
            return outputs, None

        return attend

    def _make_dropout(self, key):
        """Returns the dropout of attention weights; None in evaluation or at rate 0."""
        rate = self.config.attention_dropout_rate
        if key is None or not rate:
            return None
        heads = tensor.number_heads(self.config.num_heads, self.config.num_kv_heads)
        return Dropout(rate, fold_name(key, "attention"), heads)

    def _attend_full(
        self, q, k, v, segment_ids, lengths, window, *, dropout, spread=False
    ):
        """Computes dense or sparse attention of the sequence that a device sees."""
        q, k, v = (remat.mark(x, remat.PROJECTIONS) for x in (q, k, v))
        if self.sparse is not None:
            mask = None if lengths is None else _length_mask(lengths, k.shape[1])
            masks = {"segment_ids": segment_ids, "key_mask": mask, "window": window}
            return sparse.sparse_attention(q, k, v, self.sparse, spread=spread, **masks)
        attend = functools.partial(
            attention.dot_product_attention,
            causal=self.causal,
            bounds=self.bounds,
            dropout=dropout,
            implementation=self.implementation,
            value_size=self.config.value_size,
        )
        masks = {"segment_ids": segment_ids, "lengths": lengths}
        sinks = self.attention.laid_sinks()
        if not self.invariant:
            return attend(q, k, v, window=window, sinks=sinks, **masks)
        assert window is None  # see config.model_rules
        ids = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        given = positions_in_segments(ids), scores_of(self.bounds, q.shape[-1])
        y = attend_to_rows(attend, q, k, v, *given, sinks=sinks, **masks)
        return remat.mark(y, remat.ATTENTION)

    def _attend(self, attend, x, context, key, adapter_dropout=None):
        """Adds attention to the stream; returns the stream and the cache."""
        x = remat.mark(tensor.pin_stream(x), remat.INPUT)
        y = self._norm_input(self.attention_norm, x)
        rotation = context.rotation if self.rotates else None
        if self.rotates and self.bounds.window and context.local_rotation is not None:
            # Gemma 3 rotates sliding layers by another base than full ones.
            rotation = context.local_rotation
        y, cache = self.attention(y, rotation, attend, adapter_dropout)
        norms = self.attention_norm, self.attention_output_norm
        return self._add_residual(*norms, x, y, key), cache

    def _norm_input(self, norm, x):
        return norm(x) if self.norm_position in ("input", "both") else x

    def _add_mlp(self, x, y, key):
        return self._add_residual(self.mlp_norm, self.mlp_output_norm, x, y, key)

    def _add_residual(self, norm, output_norm, x, y, key):
        """Adds a layer's output to the stream, with the norms of `norm_position`."""
        y = norm(y) if self.norm_position == "output" else y
        y = y if output_norm is None else output_norm(y)
        # Named before a norm reads it: recomputing the norm then repeats no product.
        y = y if key is None else layers.dropout(y, self.config, key)
        add = layers.adder(invariant=self.invariant)
        x = remat.mark(add(x, y), remat.MIDDLE)
        return norm(x) if self.norm_position == "stream" else x


def run_tile(
    tile: FeedForward,
    mlp_input: Float[Array, "B L M"],
    key: jax.Array | None,
    *,
    config: schema.Model,
) -> Float[Array, "B L M"]:
    """Returns the output of a feed-forward tile, to be added to the block's stream.

    With the block's key all tiles drop equal entries, as the undivided layer would.
    """
    return layers.dropout(tile(mlp_input), config, _keys(key)[1])


def token_mask(context: Context, x: jax.Array) -> jax.Array | None:
    """Mask bool[B, L] of the tokens that are not padding; None without padding."""
    if context.segment_ids is not None:
        return context.segment_ids != 0
    if context.lengths is not None:
        return _length_mask(context.lengths, x.shape[1])
    return None


def _length_mask(lengths, size):
    return jnp.arange(size, dtype=lengths.dtype)[None] < lengths[:, None]


def _keys(key):
    """Returns the dropout keys of attention and feed-forward."""
    return (None, None) if key is None else tuple(jax.random.split(key))


class BlockGroup(nnx.Module):
    """Layers that run as one block, such as a dense layer and one with experts."""

    def __init__(self, blocks: Sequence[Block]):
        self.num_layers = len(blocks)
        for number, block in enumerate(blocks):
            setattr(self, f"layer{number}", block)

    def __call__(
        self, x: Float[Array, "B L M"], context: Context, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B L M"], Auxiliary]:
        """Transforms the stream; the key is None in evaluation."""
        auxiliaries = []
        for number, block in enumerate(layers_of(self)):
            x, auxiliary = block(x, context.of_layer(number), fold_in(key, number))
            auxiliaries.append(auxiliary)
        totals = {n: x for each in auxiliaries for n, x in each.totals.items()}
        return x, combine(auxiliaries)._replace(totals=totals)


def layers_of(block: Block | BlockGroup) -> tuple[Block, ...]:
    """Returns the layers of a block."""
    if isinstance(block, Block):
        return (block,)
    return tuple(getattr(block, f"layer{i}") for i in range(block.num_layers))


class Segments(nnx.Module):
    """Several segments, named `segment0`, `segment1`, ..."""

    def __init__(self, segments: "Sequence[Block | BlockGroup]"):
        self.num_segments = len(segments)
        for number, segment in enumerate(segments):
            setattr(self, f"segment{number}", segment)


def segments_of(blocks: "Block | BlockGroup | Segments") -> dict[str, Any]:
    """Returns stacked blocks of each segment by name; a single segment has name ""."""
    if not isinstance(blocks, Segments):
        return {"": blocks}
    names = [f"segment{number}" for number in range(blocks.num_segments)]
    return {name: getattr(blocks, name) for name in names}


def make_segments(
    make_block: Callable[[nnx.Rngs, mixture.Layer], Block],
    config: schema.Model,
    *,
    rngs: nnx.Rngs,
    only_block: jax.Array | None = None,
) -> "Block | BlockGroup | Segments":
    """Makes the blocks of a model, stacked by segment."""

    def make_stacked(shape: mixture.SegmentShape) -> Block | BlockGroup:
        def make(rngs: nnx.Rngs) -> Block | BlockGroup:
            blocks = [make_block(rngs, layer) for layer in shape.layers]
            # A group of one would add `layer0` to all paths of parameters.
            return blocks[0] if len(blocks) == 1 else BlockGroup(blocks)

        return make_blocks(make, shape.num_blocks, rngs=rngs, only_block=only_block)

    segments = [make_stacked(shape) for shape in mixture.segment_shapes(config)]
    return segments[0] if len(segments) == 1 else Segments(segments)


def make_blocks(
    make_block: Callable[[nnx.Rngs], Any],
    num_blocks: int,
    *,
    rngs: nnx.Rngs,
    only_block: jax.Array | None = None,
) -> Any:
    """Makes a block with stacked parameters, with `layers` as first dim.

    `only_block`, int32[], is the index of a block in its segment: every segment makes
    this block alone, as offload needs blocks one by one. None makes all blocks.
    """

    def init(key: jax.Array):
        return nnx.state(make_block(nnx.Rngs(params=key)))

    def name_layers(variable):
        return variable.replace(logical=("layers", *variable.get_metadata("logical")))

    numbers = jnp.arange(num_blocks) if only_block is None else only_block[None]
    # By number, so that a block made alone has equal values.
    keys = jax.vmap(functools.partial(jax.random.fold_in, rngs.params()))(numbers)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(params=keys[0]))))
    state = jax.tree.map(
        name_layers, jax.vmap(init)(keys), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return nnx.merge(graph, state)
