"""A model as a pipeline takes it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zjax.typing import Loss


@dataclasses.dataclass(frozen=True)
class Line:
    """A model as a pipeline takes it; a stream is any tree of arrays.

    Args:
        embed: `embed(params, batch, key) -> (stream, context)`.
        chunk: `chunk(layers, stream, context, key, number) -> stream`: a list of those
            of one chunk for each segment; int32[] `number` counts the chunks of the
            model.
        head: `head(params, stream, batch, weight) -> (objective, loss)`: what to
            differentiate, and what to report, of a microbatch of float32[] `weight`.
        fetches: Whether these gather the parameters, which then are there for one pass
            alone.
        communicates: Whether chunks exchange anything between devices.
    """

    embed: Callable[..., Any]
    chunk: Callable[..., Any]
    head: Callable[..., tuple[jax.Array, Loss]]
    fetches: bool = False
    communicates: bool = False


@dataclasses.dataclass(frozen=True)
class Parts:
    """Trees of the embedding, of the stages [stages, chunks, ...] and of the head."""

    embed: Any
    stages: Any
    head: Any


jax.tree_util.register_dataclass(Parts, ["embed", "stages", "head"], [])
