"""What a stage of a pipeline is and has in one tick."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from zjax.parallel.schedule import Lane
from zjax.typing import Params


@dataclasses.dataclass(frozen=True)
class Here:
    """A stage in a tick: the chunk whose turn it is, and what that reads and is.

    Args:
        chunks: The layers of each chunk, by segment.
        lane: The pass of the stage.
        rest: Context, key and int32[] number of the chunk in the model.
        is_due: bool[], whether the stage has a pass; else what it hands on is not read,
            and what it adds to gradients must be 0.
        is_first: bool[], whether the chunk is the first of the model.
        is_last: bool[], whether it is the last.
        fetches: Whether layers gather their parameters.
        communicates: Whether they exchange anything between devices.
        chunk: Which one it is, in a program of that chunk alone.
        layers: Those of the chunk, in `in_chunk`.
    """

    chunks: list[list[list[Params]]]
    lane: Lane
    rest: tuple[Any, Any, jax.Array]
    is_due: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    fetches: bool
    communicates: bool
    chunk: int | None = None
    layers: list[list[Params]] | None = None

    def in_chunk(self, run: Callable[..., Any], *args: Any) -> Any:
        """Calls `run(here, *args)` where `here` has the layers of its chunk.

        Each chunk has a program of its own, which reads its layers where they are; but
        what communicates must not hang on what a stage decides, and has a copy.
        """

        def own_layers(chunk: int) -> list[list[Params]]:
            return self.chunks[chunk]

        def run_alone(chunk: int, *args: Any) -> Any:
            own = dataclasses.replace(self, chunk=chunk, layers=own_layers(chunk))
            return run(own, *args)

        def by_chunk(function: Callable[..., Any], *args: Any) -> Any:
            numbers = range(len(self.chunks))
            ways = [functools.partial(function, number) for number in numbers]
            return jax.lax.switch(self.lane.chunk, ways, *args)

        if not self.communicates or len(self.chunks) == 1:
            return by_chunk(run_alone, *args)
        return run(dataclasses.replace(self, layers=by_chunk(own_layers)), *args)

    def args(self, values: Any) -> tuple[list[list[Params]], Any, Any]:
        """What a pass takes: layers, values of its own, and the rest."""
        assert self.layers is not None
        if not self.fetches:
            return self.layers, values, self.rest
        # Else the compiler fetches before the first tick, and keeps it all to the last.
        return *jax.lax.optimization_barrier((self.layers, values)), self.rest
