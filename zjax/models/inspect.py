"""Inspection of built-in models: chosen experts, and log-likelihoods of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ModelError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.block import layers_of, segments_of
from zjax.models.mixture import MixtureOfExperts
from zjax.models.stack import Decoder, StackedModel
from zjax.parallel import sequence
from zjax.settings.mixture import segment_shapes


@dtype_promotion()
def chosen_experts(
    model: Any, batch: dict[str, Any]
) -> tuple[Int[Array, "B L K"], ...]:
    """Returns the experts that each token chooses in evaluation, before any drop.

    Args:
        model: Decoder or encoder, such as `run.bind(state)`.
        batch: Arrays `tokens` int32[B, L], and all arrays that the model reads, except
            targets.

    Returns:
        Experts of each token per layer with experts, best first; empty without any. In
        expert choice the tokens of the batch compete, and entry e of a token is e, or
        -1 if expert e did not choose the token.

    Raises:
        ModelError: The model is not a built-in one.

    Example:
        >>> import jax.numpy as jnp
        >>> from zjax.settings import schema
        >>> from zjax.models.stack import Decoder
        >>> config = schema.Model(num_layers=2, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8,
        ...                       moe=schema.TokenChoice(num_experts=4, top_k=2))
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> [x.shape for x in chosen_experts(decoder, {"tokens": jnp.array([[3, 1]])})]
        [(1, 2, 2), (1, 2, 2)]
    """
    if not isinstance(model, StackedModel):
        problem = "is not a built-in model"
        remedy = "ask its layers, zjax.nnx.MoE.chosen_experts"
        raise ModelError(Problem("model", type(model).__name__, problem, remedy))
    graph, state = nnx.split(model)
    return _chosen(state, batch, graph=graph)


@functools.partial(jax.jit, static_argnames="graph")
def _chosen(state, batch, *, graph):
    """Runs the blocks one by one, and collects the choices of layers with experts."""
    model = nnx.merge(graph, state)
    x, context = model.embedding(batch)
    chosen = []
    segments, shapes = segments_of(model.blocks), segment_shapes(model.config)
    for stacked, shape in zip(segments.values(), shapes, strict=True):
        block_graph, params = nnx.split(stacked)
        for number in range(shape.num_blocks):
            one = jax.tree.map(lambda param, i=number: param[i], params)
            for layer in layers_of(nnx.merge(block_graph, one)):
                if isinstance(layer.mlp, MixtureOfExperts):
                    experts = layer.chosen_experts(x, context)
                    # Tokens are in the order in which devices split sequences.
                    chosen.append(sequence.restore(experts, model.config))
                x, _ = layer(x, context)
    return tuple(chosen)


def log_likelihood(
    model: Decoder,
    tokens: Int[Array, "B L"],
    targets: Int[Array, "B L"],
    counts: Bool[Array, "B L"],
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums the log-probabilities of targets, and says whether all are most likely.

    Padding is on the right; `counts` masks the targets that count.
    """
    graph, state = nnx.split(model)
    return _log_likelihood(state, tokens, targets, counts, graph=graph)


@functools.partial(jax.jit, static_argnames="graph")
def _log_likelihood(state, tokens, targets, counts, *, graph):
    """Computes `log_likelihood` as one program."""
    logits = nnx.merge(graph, state)(tokens)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    each = chosen - jax.nn.logsumexp(logits, -1)
    is_best = (logits.argmax(-1) == targets) | ~counts
    return jnp.sum(each * counts, -1), is_best.all(-1)
