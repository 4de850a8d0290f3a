"""Decoder and encoder as modules, and as a `Stack`: embedding, blocks, head."""

import functools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.jaxprs.versions import dtype_promotion
from zjax.models import layers
from zjax.models.block import (
    Block,
    BlockGroup,
    Segments,
    layers_of,
    make_segments,
    run_tile,
    segments_of,
    token_mask,
)
from zjax.models.embedding import Context, Embedding
from zjax.models.feed_forward import TiledFeedForward
from zjax.models.heads import Head
from zjax.models.mixture import MixtureOfExperts
from zjax.models.nnx import nest, values_of
from zjax.moe.balance import move_bias
from zjax.ops import remat
from zjax.ops.attention_maps import attention_divergence
from zjax.parallel import sequence
from zjax.settings import schema
from zjax.settings.mixture import Layer, num_blocks, segment_shapes
from zjax.stack.forward import Execution, run_stack
from zjax.typing import Auxiliary, Params, Segment, Stack, Tiles


class Decoder(nnx.Module):
    """A causal language model.

    Weights are initialised normally with deviation 0.02, weights that write to the
    residual stream with 0.02 / sqrt(2 num_layers), as in GPT-2; biases with 0, scales
    with 1.

    Args:
        deterministic: Whether embedding gradients are summed in a fixed order.
        batch_invariant: Whether logits of a token are the same bits in all batches, in
            training and generation.
        only_block: int32[], index of the only block of each segment to initialise;
            None means all blocks.
    """

    states_weight = 0.0
    """Weight of the distance from a teacher's stream."""
    maps_weight = 0.0
    """Weight of the divergence from a teacher's attention."""

    def __init__(
        self,
        config: schema.Model,
        *,
        matmul_dtype: layers.MatmulDtype = "compute",
        deterministic: bool = False,
        batch_invariant: bool = False,
        only_block: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        def make_block(rngs: nnx.Rngs, layer: Layer) -> Block:
            return Block(
                config,
                layer=layer,
                causal=True,
                norm_position=config.norm_position,
                matmul_dtype=matmul_dtype,
                rngs=rngs,
            )

        self.config = config
        self.embedding = Embedding(config, deterministic=deterministic, rngs=rngs)
        self.blocks = make_segments(
            make_block, config, rngs=rngs, only_block=only_block
        )
        self.head = Head(config, rngs=rngs)
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        modules: Any = nnx.iter_modules(self)
        for _, module in modules:
            if hasattr(module, "invariant"):
                module.invariant = batch_invariant

    @dtype_promotion()
    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *,
        segment_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Returns float32 logits of the next token; `segment_ids` of 0 are padding."""
        batch = {"tokens": tokens}
        if segment_ids is not None:
            batch["segment_ids"] = segment_ids
        x = sequence.restore(hidden_states(self, batch, None), self.config)
        return self.head.logits(x, self._table())

    def _table(self):
        """Returns the token table of a tied model; None otherwise."""
        return self.embedding.tokens[...] if self.config.tied_head else None


class Encoder(nnx.Module):
    """A bidirectional masked language model.

    Weights are initialised normally with deviation 0.02, biases with 0, scales with 1.

    Args:
        use_pooling: Whether to create the layer of `pool`.
        deterministic: Whether embedding gradients are summed in a fixed order.
        only_block: int32[], index of the only block of each segment to initialise;
            None means all blocks.
    """

    states_weight = 0.0
    """Weight of the distance from a teacher's stream."""
    maps_weight = 0.0
    """Weight of the divergence from a teacher's attention."""

    def __init__(
        self,
        config: schema.Model,
        *,
        use_pooling: bool = False,
        matmul_dtype: layers.MatmulDtype = "compute",
        deterministic: bool = False,
        only_block: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        def make_block(rngs: nnx.Rngs, layer: Layer) -> Block:
            return Block(
                config,
                layer=layer,
                causal=False,
                norm_position="stream",
                matmul_dtype=matmul_dtype,
                rngs=rngs,
            )

        embed: layers.Dims = (("embed", config.embed_size),)
        self.config = config
        self.embedding = Embedding(
            config,
            use_norm=True,
            deterministic=deterministic,
            rngs=rngs,
        )
        self.blocks = make_segments(
            make_block, config, rngs=rngs, only_block=only_block
        )
        self.head = Head(config, masked=True, rngs=rngs)
        self.pooling = (
            layers.Linear(embed, embed, use_bias=config.use_bias, rngs=rngs)
            if use_pooling
            else None
        )

    @dtype_promotion()
    def __call__(
        self, batch: dict[str, Any], key: jax.Array | None = None
    ) -> Float[Array, "B L M"]:
        """Encodes a batch to one vector per token.

        `batch` has `tokens` int32[B, L] and may have `lengths` int32[B] (padding
        follows), `segment_ids` (0 is padding), `positions` and `token_types` int32[B,
        L]. The key is None in evaluation.
        """
        return hidden_states(self, batch, key)

    @dtype_promotion()
    def logits(self, batch: dict[str, Any]) -> Float[Array, "B L V"]:
        """Returns logits of the token at each position, in float32."""
        return self.head.logits(self(batch), self._table())

    @dtype_promotion()
    def pool(self, batch: dict[str, Any]) -> Float[Array, "B M"]:
        """Returns a vector per row: the first token's, through a layer and tanh.

        Needs `use_pooling`.
        """
        assert self.pooling is not None
        return jnp.tanh(self.pooling(self(batch)[:, 0]))

    def _table(self):
        return self.embedding.tokens[...] if self.config.tied_head else None


SHARED = "embedding/tokens"
"""Path of the token table, which the head of a tied model also reads."""


@runtime_checkable
class StackedModel(Protocol):
    """Decoder or encoder."""

    config: schema.Model
    embedding: Embedding
    blocks: Block | BlockGroup | Segments
    head: Head
    states_weight: float
    maps_weight: float


def make_stack(model: StackedModel) -> Stack:
    """Splits a model into functions of embedding, blocks and head.

    Parameters are trees of dicts at the paths of the model: embed holds `embedding`,
    head holds `head` and, if tied, a copy of `embedding/tokens`. The model's values may
    be abstract, and pooling is left out. `join` sums both gradients of a tied table; to
    join parameters, zero the head's copy first.
    """
    config, names = model.config, tuple(segments_of(model.blocks))
    embedding, _ = nnx.split(model.embedding)
    head_graph, _ = nnx.split(model.head)
    # The mean over blocks, as auxiliary losses are summed.
    number = num_blocks(config)
    weights = model.states_weight / number, model.maps_weight / number

    def embed(params, batch, key):
        return nnx.merge(embedding, params["embedding"])(batch, key)

    def head(params, carry, batch):
        table = head_table(params, config)
        sums = nnx.merge(head_graph, params["head"]).loss(carry, table, batch)
        metrics = {"accuracy": sums.correct_sum}
        if sums.divergence_sum is not None:
            metrics["teacher_divergence"] = sums.divergence_sum
            weighted = batch["teacher"]["weight"] * sums.divergence_sum
            # The loss to compare with runs without a teacher.
            metrics["token_loss"] = sums.loss_sum - weighted
        return sums.loss_sum, sums.weight_sum, metrics

    def factors(params, carry):
        hidden = sequence.restore(carry, config)
        head = nnx.merge(head_graph, params["head"])
        return head.factors(hidden, head_table(params, config))

    def target_logprobs(params, carry, targets, temperature):
        head, table = nnx.merge(head_graph, params["head"]), head_table(params, config)
        return head.target_logprobs(carry, table, targets, temperature)

    def values(params, carry):
        return nnx.merge(head_graph, params["head"]).values(carry)

    return Stack(
        embed=embed,
        segments=tuple(
            _segment(blocks, shape.num_blocks, weights)
            for blocks, shape in zip(
                segments_of(model.blocks).values(), segment_shapes(config), strict=True
            )
        ),
        head=head,
        split=lambda params: _split(params, names, config),
        join=lambda embed, segments, head: _join(embed, segments, head, names, config),
        shared=(SHARED,) if config.tied_head else (),
        # A bias or a cap comes after the product of the factors.
        factors=factors
        if config.kind == "decoder" and not config.logit_soft_cap
        else None,
        take_tokens=Context.take_tokens,
        of_block=Context.of_block if config.moe or any(weights) else None,
        target_logprobs=target_logprobs if config.kind == "decoder" else None,
        values=values if config.value_head else None,
    )


def execution_of(config: schema.Model) -> Execution:
    """Returns the execution of a model's blocks in one program."""
    memory = remat.within_reach(config.activation_memory)
    return Execution(config.layers_per_scan, config.remat, memory)


def hidden_states(
    model: StackedModel, batch: dict[str, Any], key: jax.Array | None
) -> Float[Array, "B L M"]:
    """Returns the stream after the last block, which the head reads."""
    # Through the stack, so that modules and training share one forward pass.
    params = nest(values_of(nnx.state(model, nnx.Param)))
    stack, execution = make_stack(model), execution_of(model.config)
    return run_stack(stack, params, batch, key, execution)[0]


def head_table(params: Params, config: schema.Model) -> Float[Array, "V M"] | None:
    """Returns the token table among the head's parameters; None if not tied."""
    return params["embedding"]["tokens"] if config.tied_head else None


def _tiled_mlp(blocks: Block) -> TiledFeedForward:
    """Returns the tiled feed-forward of blocks."""
    assert isinstance(blocks.mlp, TiledFeedForward)
    return blocks.mlp


def without_tiles(blocks: Block) -> Block:
    """Returns blocks without the tiles of the feed-forward, for `Block.trunk`."""
    trunk_blocks = nnx.clone(blocks)
    _tiled_mlp(trunk_blocks).tiles = nnx.Dict({})
    return trunk_blocks


def _tiles(blocks: Block, config: schema.Model) -> Tiles:
    """Makes the functions of a block in tiles."""
    tile_graph, _ = nnx.split(_tiled_mlp(blocks).tiles["0"])
    trunk_graph, _ = nnx.split(without_tiles(blocks))

    def split(params):
        mlp = dict(params["mlp"])
        tiles = mlp.pop("tiles")
        return params | {"mlp": mlp}, tuple(tiles[str(i)] for i in range(len(tiles)))

    def trunk(params, carry, context, key):
        carry, mlp_input = nnx.merge(trunk_graph, params).trunk(carry, context, key)
        return (carry, mlp_input), Auxiliary()

    def tile(params, mlp_input, key):
        tile = nnx.merge(tile_graph, params)
        return run_tile(tile, mlp_input, key, config=config)

    add = layers.adder(invariant=blocks.invariant)
    return Tiles(split=split, trunk=trunk, tile=tile, add=add)


def _with_term(
    auxiliary: Auxiliary, name: str, value: jax.Array, weight: float
) -> Auxiliary:
    """Adds a difference of a block from the teacher to loss and metrics."""
    loss = weight * value
    loss = loss if auxiliary.loss is None else auxiliary.loss + loss
    metrics = {**auxiliary.metrics, name: value}
    return auxiliary._replace(loss=loss, metrics=metrics)


def stream_distance(
    x: Float[Array, "B L W"],
    target: Float[Array, "B L W"],
    mask: Bool[Array, "B L"] | None,
) -> Float[Array, ""]:
    """Averages the squared error over the squared norm of the target, over tokens.

    Example:
        >>> x, target = jnp.array([[[1.0, 0], [3, 3]]]), jnp.array([[[2.0, 0], [3, 3]]])
        >>> float(stream_distance(x, target, None))
        0.125
    """
    x, target = x.astype(jnp.float32), target.astype(jnp.float32)
    error, size = jnp.square(x - target).sum(-1), jnp.square(target).sum(-1)
    # A stream of zeros is reached by zeros alone.
    distances = error / jnp.maximum(size, jnp.finfo(jnp.float32).tiny)
    if mask is None:
        return distances.mean()
    return jnp.sum(distances * mask) / jnp.maximum(mask.sum(), 1)


def _segment(
    blocks: Block | BlockGroup, num_blocks: int, weights: tuple[float, float]
) -> Segment:
    """Makes the segment of stacked blocks, with the rules that move router biases.

    `weights` are of the differences from a teacher's stream and attention.
    """
    graph, _ = nnx.split(blocks)
    config, tiles = layers_of(blocks)[0].config, None
    if isinstance(blocks, Block) and config.mlp_tiles > 1:
        tiles = _tiles(blocks, config)

    def block(params, carry, context, key):
        module, heads = nnx.merge(graph, params), []
        if context.heads is not None:
            layers_of(module)[-1].on_heads = lambda q, k: heads.append((q, k))
        mask = token_mask(context, carry)
        carry, auxiliary = module(carry, context, key)
        if context.states is not None:
            distance = stream_distance(carry, context.states, mask)
            auxiliary = _with_term(auxiliary, "hidden_distance", distance, weights[0])
        if context.heads is not None:
            divergence = attention_divergence(
                heads[0],
                context.heads,
                cap=config.attention_soft_cap,
                segment_ids=context.segment_ids,
                token_mask=mask,
            )
            name = "attention_divergence"
            auxiliary = _with_term(auxiliary, name, divergence, weights[1])
        return carry, auxiliary

    totals, moves = {}, {}
    for number, layer in enumerate(layers_of(blocks)):
        if isinstance(layer.mlp, MixtureOfExperts):
            totals["load"] = (layer.mlp.settings.num_experts,)
            path = "mlp/router/bias"
            # Paths of a group of layers begin with the name of the layer.
            path = path if blocks is layer else f"layer{number}/{path}"
            if layer.mlp.moe.has_choice_bias:
                moves[path] = functools.partial(_even_load, config.bias_rate)
    return Segment(block, num_blocks, tiles, totals, moves)


def _even_load(rate: float, bias: jax.Array, totals: Mapping[str, jax.Array]):
    """Moves the router biases of a block by the load of the experts."""
    return move_bias(bias, totals["load"], rate)


def _split(params: Params, names: tuple[str, ...], config: schema.Model):
    """Selects the parameters of embedding, segments and head."""
    blocks = params["blocks"]
    embed = {"embedding": params["embedding"]}
    head = {"head": params["head"]}
    if config.tied_head:
        # Two names for one table: `join` adds both gradients.
        head["embedding"] = {"tokens": params["embedding"]["tokens"]}
    return embed, tuple(blocks[name] if name else blocks for name in names), head


def _join(embed: Params, segments, head: Params, names, config: schema.Model):
    """Joins gradients of embedding, segments and head, summing a tied table's."""
    blocks = dict(zip(names, segments, strict=True))
    joined: dict[str, Any] = {
        "embedding": dict(embed["embedding"]),
        "blocks": blocks.get("", blocks),
        "head": head["head"],
    }
    if config.tied_head:
        joined["embedding"]["tokens"] += head["embedding"]["tokens"]
    return joined
