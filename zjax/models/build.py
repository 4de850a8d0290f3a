"""The built-in model that a configuration describes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zjax.config.schema import Config
from zjax.models import adapter
from zjax.models.decoder import Decoder
from zjax.models.encoder import Encoder
from zjax.models.part import fold_name
from zjax.models.stack import make_stack
from zjax.parallel import remat
from zjax.typing import Batch, Metrics, Model, ModelState, Params, Pieces


def make_model(config: Config) -> Model:
    """Makes the decoder or encoder of `config.model`, without its weights.

    Its batches are dicts of `tokens` and `targets` int32[B, L] and, where wanted,
    `weights` float32[B, L], `segment_ids` and `positions` int32[B, L]; an encoder also
    takes `lengths` int32[B]. Its loss is the mean over tokens by weight, its metric the
    share of targets that were the most likely token.

    Args:
        config: Read for `model`, `precision.matmul_dtype` and `data.length`.

    Returns:
        The model as functions, and as a stack.

    Example:
        >>> config = Config()
        >>> model = make_model(config)
        >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
        >>> params["blocks"]["0"]["attention"]["query"]["kernel"].shape
        (768, 12, 64)
    """
    kind = {"decoder": Decoder, "encoder": Encoder}[config.model.kind]
    matmul_dtype = config.precision.matmul_dtype
    make = functools.partial(kind, config.model, matmul_dtype=matmul_dtype)
    tokens = jax.ShapeDtypeStruct((1, config.data.length), jnp.int32)
    model = adapter.adapt(make, mean_loss, {"tokens": tokens, "targets": tokens})
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    separable = config.model.dropout_rate == 0
    return dataclasses.replace(
        model,
        stack=make_stack(abstract),
        pieces=None if config.model.layers_per_scan else make_pieces(make, model),
        separable=separable,
        keeps=remat.keeps(config.model.remat),
    )


def make_pieces(make: Callable[..., Decoder | Encoder], model: Model) -> Pieces:
    """Initialises a model of separate layers with one program for all of them.

    Args:
        make: `make(rngs=..., first_layer=...)` gives the module.
        model: The same, adapted.

    Returns:
        The values of `model.init`, in pieces.
    """
    abstract, _ = jax.eval_shape(model.init, jax.random.key(0))

    def rest(key: jax.Array) -> tuple[Params, ModelState]:
        params, model_state = model.init(key)
        return pick(params)[0], model_state

    def layer(key: jax.Array, number: jax.Array) -> Params:
        rngs = nnx.Rngs(fold_name(key, "model"))
        block = make(rngs=rngs, first_layer=number).blocks[0]
        return nnx.to_pure_dict(nnx.state(block, nnx.Param))

    def join(rest: Params, layers: Sequence[Params]) -> Params:
        blocks = {str(number): block for number, block in enumerate(layers)}
        return rest | {"blocks": blocks}

    def pick(params: Params) -> tuple[Params, Sequence[Params]]:
        others = {name: tree for name, tree in params.items() if name != "blocks"}
        blocks = params["blocks"]
        return others, [blocks[str(number)] for number in range(len(blocks))]

    return Pieces(rest, layer, len(abstract["blocks"]), join, pick)


def mean_loss(
    view: Decoder | Encoder, batch: Batch, key: jax.Array | None
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Averages the loss of a built-in model over its tokens, in the adapter's form.

    Args:
        view: The model with its weights.
        batch: Tokens and targets.
        key: For dropout; None is evaluation.

    Returns:
        Mean loss (0 where no token counts), weight and metrics.
    """
    sums = view.loss(batch, key)

    def mean(total: Any) -> jax.Array:
        return total / jnp.where(sums.weight_sum > 0, sums.weight_sum, 1.0)

    return mean(sums.loss_sum), sums.weight_sum, {"accuracy": mean(sums.correct_sum)}
