"""Streams of a teacher's layers that the layers of a student shall reach."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.run.pruned_start import recorded
from zjax.settings import schema
from zjax.settings.mixture import segment_shapes
from zjax.stack.forward import run_stack
from zjax.typing import Auxiliary, Batch, Model, Params, Segment, Stack

_STREAM = "stream"


class Targets(NamedTuple):
    """What of a teacher the blocks of a student shall reach."""

    blocks: tuple[int, ...]
    """Block of the teacher for each block of the student."""
    channels: tuple[int, ...] | None
    """Channels of the teacher that the student has; None for all."""


def targets_of(config: schema.Config, teacher: schema.Model, path: str) -> Targets:
    """Finds the layer of a teacher for each block of a student.

    Layers of a pruned start have the layers that they are copies of; layer i of n has
    the layer in which the same fraction of the N layers ends.

    Raises:
        ConfigError: The teacher has other sizes than what a pruned start began from.
    """
    student, channels = config.model, None
    ends = _ends(student)
    # Rounded up, so that the last layers follow the last layer.
    numbers = [
        -(-(end + 1) * teacher.num_layers // student.num_layers) - 1 for end in ends
    ]
    if start := recorded(config):
        large, kept = start.large.model, start.kept
        sizes = [(x.num_layers, int(x.embed_size)) for x in (teacher, large)]
        if sizes[0] != sizes[1]:
            problem = f"has {sizes[0][0]} layers of {sizes[0][1]} channels, and "
            problem += "distill.hidden follows a start from "
            problem += f"{sizes[1][0]} of {sizes[1][1]}"
            remedy = "use a teacher of the same sizes, or set distill.hidden to None"
            raise ConfigError(Problem("distill.teacher", path, problem, remedy))
        numbers, channels = [kept.layers[end] for end in ends], kept.channels
    last = _ends(teacher)
    blocks = tuple(int(np.searchsorted(last, number)) for number in numbers)
    return Targets(blocks, channels)


def _ends(model: schema.Model) -> list[int]:
    """Number of the last layer of each block."""
    shapes = segment_shapes(model)
    sizes = [len(x.layers) for x in shapes for _ in range(x.num_blocks)]
    return [end - 1 for end in itertools.accumulate(sizes)]


def state_problems(
    config: schema.Config, teacher: schema.Model, path: str, student: Model
) -> Iterator[Problem]:
    """Yields reasons why a student cannot follow the streams of a teacher."""
    if not config.distill or not config.distill.hidden:
        return
    if "teacher/states" not in student.entries:
        problem = "has no effect on a model whose entries lack 'teacher/states'"
        yield Problem(
            "distill.hidden", "hidden_states", problem, "use a built-in model"
        )
    widths = int(config.model.embed_size), int(teacher.embed_size)
    if widths[0] != widths[1] and not config.prune:
        problem = (
            f"has {widths[1]} channels, and the model {widths[0]}: distill.hidden "
        )
        problem += "compares equal channels"
        remedy = "start from the teacher by prune, or set distill.hidden to None"
        yield Problem("distill.teacher", path, problem, remedy)


def run_with_states(
    stack: Stack, params: Params, batch: Batch, targets: Targets
) -> tuple[Any, Float[Array, "B L S W"]]:
    """Runs a teacher; returns the last stream, and the streams of `targets`."""
    segments = tuple(map(_telling, stack.segments))
    telling = dataclasses.replace(stack, segments=segments)
    # One by one: a scan would keep the streams of all blocks.
    carry, auxiliaries = run_stack(telling, params, batch, None)
    streams = [auxiliaries[number].metrics[_STREAM] for number in targets.blocks]
    if targets.channels is not None:
        streams = [x[..., jnp.asarray(targets.channels)] for x in streams]
    return carry, jnp.stack(streams, 2)


def _telling(segment: Segment) -> Segment:
    """Returns a segment whose blocks also return the stream behind them."""

    def block(*given: Any) -> tuple[jax.Array, Auxiliary]:
        carry, _ = segment.block(*given)
        return carry, Auxiliary(metrics={_STREAM: carry})

    return dataclasses.replace(segment, block=block, tiles=None)
