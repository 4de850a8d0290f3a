"""FLOPs of a token for each weight, of which frozen ones need fewer."""

import functools
import math
import re
from collections.abc import Mapping

import jax

from zjax.config import schema
from zjax.config.groups import is_held_frozen
from zjax.config.mixture import experts_per_token
from zjax.models.build import make_model
from zjax.sharding.paths import path_of
from zjax.sharding.placement import abstract_key

_TABLE = re.compile("embedding/(tokens|positions|token_types)")
_EXPERTS_DIM = 1
"""Dim of the experts in stacked arrays, after that of the layers."""


def flops_per_weight(config: schema.Config) -> float:
    """FLOPs of forward and backward pass per token and weight of a matrix, the mean.

    They are 2 for the product, 2 for the gradient of its input and 2 for that of the
    weight, which frozen ones do not have. Adapters themselves are left out.

    Args:
        config: Settings of a built-in model; `lora` and `optimizer.groups` freeze.

    Example:
        >>> [flops_per_weight(schema.Config(lora=schema.Lora(rank=n))) for n in (0, 16)]
        [6.0, 4.0]
    """
    groups, lora = config.optimizer.groups, config.lora
    if lora.rank and not lora.also_train:
        return 4.0
    if not lora.rank and all(group.learning_rate_scale for group in groups):
        return 6.0
    weights = multiplied_weights(config.model)
    trained = (x for path, x in weights.items() if not is_held_frozen(path, config))
    return 4.0 + 2.0 * sum(trained) / sum(weights.values())


@functools.lru_cache
def multiplied_weights(model: schema.Model) -> Mapping[str, float]:
    """The weights that a token is multiplied with, by path; see `matmul_params`.

    Example:
        >>> multiplied_weights(schema.Model())["blocks/mlp/up/kernel"] / 12
        2359296.0
    """
    built = make_model(schema.Config(model=model))
    params, _ = jax.eval_shape(built.init, abstract_key())
    weights = dict[str, float]()
    for keys, array in jax.tree_util.tree_leaves_with_path(params):
        path, size = path_of(keys), math.prod(array.shape)
        is_read_once = path == "embedding/tokens" and model.tied_head
        if "/experts/" in path:
            number = array.shape[_EXPERTS_DIM]
            size *= min(experts_per_token(model.moe), number) / number
        if is_read_once or not _TABLE.fullmatch(path):
            weights[path] = float(size)
    return weights
