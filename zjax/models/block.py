"""A transformer block, and a line of them run one by one or in a loop.

A loop over blocks of k layers stores k blocks whose parameters are stacked over the
turns of the loop: layer `turn * k + j` is row `turn` of block j. It compiles faster
than separate layers and runs slower, so separate layers are the default.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.models import layers
from zjax.models.embedding import Context
from zjax.ops import attention
from zjax.parallel import remat


class Block(nnx.Module):
    """Attention and feed-forward around a residual stream.

    Args:
        config: Shape of the model.
        causal: Whether a token sees no later one.
        norm_position: `pre` normalises what enters each layer (GPT-2, Llama), `post`
            the stream after it (BERT). Under `pre` the matrices that write to the
            stream start smaller, by the square root of their number, as in GPT-2.
        matmul_dtype: Dtype in which projections and feed-forward multiply.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        causal: bool,
        norm_position: Literal["pre", "post"],
        matmul_dtype: layers.MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        self.causal = causal
        self.norm_position = norm_position
        self.implementation: attention.Implementation = config.attention
        self.dropout_rate = config.dropout_rate
        num_writers = 2 * config.num_layers if norm_position == "pre" else 1
        out_std = layers.INIT_STD / num_writers**0.5
        self.attention_norm = layers.Norm(config)
        self.attention = layers.Attention(
            config, out_std=out_std, matmul_dtype=matmul_dtype, rngs=rngs
        )
        self.mlp_norm = layers.Norm(config)
        self.mlp = layers.FeedForward(
            config, out_std=out_std, matmul_dtype=matmul_dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "B L M"], context: Context, key: jax.Array | None = None
    ) -> Float[Array, "B L M"]:
        """Transforms the stream; a key of None is evaluation."""

        def attend(q, k, v):
            averages = attention.dot_product_attention(
                q,
                k,
                v,
                causal=self.causal,
                segment_ids=context.segment_ids,
                lengths=context.lengths,
                implementation=self.implementation,
            )
            return averages, None

        return self.attend_with(attend, x, context, key)[0]

    def attend_with(
        self,
        attend: layers.Attend,
        x: Float[Array, "B L M"],
        context: Context,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B L M"], Any]:
        """Transforms the stream with a given attention.

        Args:
            attend: Averages the values, and may keep them.
            x: The stream.
            context: Read for the rotation alone.
            key: For dropout; None is evaluation.

        Returns:
            The stream, and what `attend` kept.
        """
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        x = remat.mark(x, remat.INPUT)
        y = self._enter(self.attention_norm, x)
        y, kept = self.attention(y, context.rotation, attend)
        x = self._leave(self.attention_norm, x, y, keys[0])
        y = self.mlp(self._enter(self.mlp_norm, x))
        return self._leave(self.mlp_norm, x, y, keys[1]), kept

    def _enter(self, norm, x):
        return norm(x) if self.norm_position == "pre" else x

    def _leave(self, norm, x, y, key):
        x = remat.mark(x + layers.dropout(y, self.dropout_rate, key), remat.MIDDLE)
        return x if self.norm_position == "pre" else norm(x)


def make_blocks(
    make_block: Callable[[nnx.Rngs], Block],
    num_layers: int,
    layers_per_scan: int,
    *,
    first_layer: int | jax.Array = 0,
    rngs: nnx.Rngs,
) -> list[Block]:
    """Makes a line of blocks; its values do not depend on how it is stored.

    Args:
        make_block: Makes one block.
        num_layers: Length of the line.
        layers_per_scan: 0 keeps every layer apart; k stacks them into k blocks.
        first_layer: Number of the first block, which may be traced.
        rngs: Source of the initial values.

    Returns:
        The blocks as they are stored.
    """
    key = rngs.params()
    numbers = first_layer + jax.numpy.arange(num_layers)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)
    if layers_per_scan == 0:
        return [make_block(nnx.Rngs(params=key)) for key in keys]
    strides = [keys[j::layers_per_scan] for j in range(layers_per_scan)]
    return [_make_stacked(make_block, stride) for stride in strides]


def run_blocks(
    step: Callable[[Block, Any, Any], tuple[Any, Any]],
    blocks: Sequence[Block],
    carry: Any,
    inputs: tuple[Any, ...],
    *,
    stacked: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """Threads a value through a line of blocks.

    Args:
        step: `step(block, carry, input) -> (carry, output)`.
        blocks: The line, as `make_blocks` stored it.
        carry: What enters the first block.
        inputs: One tree per stored block, stacked like its parameters.
        stacked: Whether the parameters are stacked over the turns of a loop.

    Returns:
        What leaves the last block, and the outputs in the form of the inputs.
    """
    if not stacked:
        outputs = []
        for block, given in zip(blocks, inputs, strict=True):
            carry, output = step(block, carry, given)
            outputs.append(output)
        return carry, tuple(outputs)
    graphs, states = zip(*map(nnx.split, blocks), strict=True)

    def turn(carry, rows):
        line = [nnx.merge(*pair) for pair in zip(graphs, rows[0], strict=True)]
        return run_blocks(step, line, carry, rows[1], stacked=False)

    return jax.lax.scan(turn, carry, (states, inputs))


def transform(
    blocks: Sequence[Block],
    x: Float[Array, "B L M"],
    context: Context,
    key: jax.Array | None,
    *,
    config: schema.Model,
) -> Float[Array, "B L M"]:
    """Runs a line of blocks, recomputing in the backward pass as `config.remat` says.

    Args:
        blocks: The line, as `make_blocks` stored it.
        x: The stream.
        context: What every block reads.
        key: For dropout; layer i uses `fold_in(key, i + 1)`. None is evaluation.
        config: Shape of the model.

    Returns:
        The stream after the last block.
    """
    in_loop = 0 < config.layers_per_scan < config.num_layers

    def step(block, x, key):
        graph, state = nnx.split(block)

        def run(state, x, context, key):
            return nnx.merge(graph, state)(x, context, key)

        kept = remat.recompute(run, config.remat, in_loop=in_loop)
        return kept(state, x, context, key), None

    keys = _layer_keys(key, config.num_layers, config.layers_per_scan)
    stacked = config.layers_per_scan > 0
    x, _ = run_blocks(step, blocks, x, keys, stacked=stacked)
    return remat.mark(x, remat.INPUT)


def _layer_keys(key, num_layers, layers_per_scan):
    if key is None:
        return (None,) * (layers_per_scan or num_layers)
    numbers = jax.numpy.arange(1, num_layers + 1)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)
    if layers_per_scan == 0:
        return tuple(keys)
    return tuple(keys[j::layers_per_scan] for j in range(layers_per_scan))


def _make_stacked(make_block, keys):
    def init(key):
        return nnx.state(make_block(nnx.Rngs(params=key)))

    def name_layers(variable):
        return variable.replace(logical=("layers", *variable.get_metadata("logical")))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(params=keys[0]))))
    state = jax.tree.map(
        name_layers, jax.vmap(init)(keys), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return nnx.merge(graph, state)
