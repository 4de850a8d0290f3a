"""Dtypes of the weights and of the cache that texts are written with."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax

from zjax.errors import ConfigError, Problem
from zjax.models.joined import code_problems
from zjax.models.stack import Decoder
from zjax.ops.matmul import check_device
from zjax.ops.narrow import WEIGHT_DTYPES, WeightDtype

CacheDtype = Literal["compute", "float8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)


class Dtypes(NamedTuple):
    """How a generator stores a model; `compute` is the dtype of the weights given."""

    weights: WeightDtype = "compute"
    """Matrices of blocks."""
    cache: CacheDtype = "compute"
    """Keys and values."""


COMPUTE = Dtypes()


def dtype_problems(decoder: Any, dtypes: Dtypes) -> Iterator[Problem]:
    """Yields the problems of dtypes for a decoder, under the mesh of the passes."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {
        "weight_dtype": (dtypes.weights, WEIGHT_DTYPES),
        "cache_dtype": (dtypes.cache, CACHE_DTYPES),
    }
    for field, (value, values) in known.items():
        if value not in values:
            problem, remedy = f"is none of {', '.join(values)}", "use 'compute'"
            yield Problem(field, value, problem, remedy)
        elif value != "compute" and not isinstance(decoder, Decoder):
            problem = "goes with the built-in decoder, stored on the devices"
            yield Problem(field, value, problem, "use 'compute'")
        elif value != "compute" and decoder.invariant:
            problem = "rounds what training does not, and the model is batch-invariant"
            yield Problem(field, value, problem, "use 'compute'")
    if dtypes.weights not in WEIGHT_DTYPES[1:] or not isinstance(decoder, Decoder):
        return
    yield from code_problems(decoder, dtypes.weights)
    if dtypes.weights == "float8":
        try:
            check_device(jax.devices()[0], "weight_dtype")
        except ConfigError as error:
            yield from error.problems
