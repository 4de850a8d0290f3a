"""Streams and attention of a teacher's layers that a student's layers shall reach."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.models.block import layers_of, segments_of
from zjax.models.stack import Decoder, make_stack
from zjax.run.pruned_start import recorded
from zjax.schedule.training import Told
from zjax.settings import schema
from zjax.settings.distill import UNCOMPARED
from zjax.settings.mixture import segment_shapes
from zjax.stack.forward import run_stack
from zjax.typing import Auxiliary, Batch, Model, Params, Segment

COMPARED = {"hidden": "hidden_states", "attention": "attention_maps"}
"""Sections of `distill` that compare layers, with the name of the kind of each."""
_STREAM, _QUERIES, _KEYS = "stream", "queries", "keys"


class Targets(NamedTuple):
    """What of a teacher the blocks of a student shall reach."""

    blocks: tuple[int, ...]
    """Block of the teacher for each block of the student."""
    channels: tuple[int, ...] | None
    """Channels of the teacher that the student has; None for all."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Groups of the teacher's heads that the student has, by block; None for all."""


def targets_of(config: schema.Config, teacher: schema.Model, path: str) -> Targets:
    """Finds the layer of a teacher for each block of a student.

    Layers of a pruned start have the layers that they are copies of; layer i of n has
    the layer in which the same fraction of the N layers ends.

    Raises:
        ConfigError: The teacher has other sizes than what a pruned start began from.
    """
    student, channels, groups = config.model, None, None
    ends = _ends(student)
    # Rounded up, so that the last layers follow the last layer.
    numbers = [
        -(-(end + 1) * teacher.num_layers // student.num_layers) - 1 for end in ends
    ]
    fields = [x for x in COMPARED if getattr(config.distill, x, None)]
    if start := recorded(config):
        large, kept = start.large.model, start.kept
        sizes = [(x.num_layers, int(x.embed_size)) for x in (teacher, large)]
        if sizes[0] != sizes[1]:
            problem = f"has {sizes[0][0]} layers of {sizes[0][1]} channels, and "
            problem += f"distill.{fields[0]} follows a start from "
            problem += f"{sizes[1][0]} of {sizes[1][1]}"
            remedy = "use a teacher of the same sizes, or set "
            remedy += f"{' and '.join(f'distill.{x}' for x in fields)} to None"
            raise ConfigError(Problem("distill.teacher", path, problem, remedy))
        numbers, channels = [kept.layers[end] for end in ends], kept.channels
        if kept.groups is not None:
            groups = tuple(kept.groups[end] for end in ends)
    last = _ends(teacher)
    blocks = tuple(int(np.searchsorted(last, number)) for number in numbers)
    return Targets(blocks, channels, groups)


def _ends(model: schema.Model) -> list[int]:
    """Number of the last layer of each block."""
    shapes = segment_shapes(model)
    sizes = [len(x.layers) for x in shapes for _ in range(x.num_blocks)]
    return [end - 1 for end in itertools.accumulate(sizes)]


def state_problems(
    config: schema.Config, teacher: schema.Model, path: str, student: Model
) -> Iterator[Problem]:
    """Yields reasons why a student cannot follow the layers of a teacher."""
    if config.distill and config.distill.attention:
        yield from _map_problems(config, teacher, path, student)
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


def _map_problems(
    config: schema.Config, teacher: schema.Model, path: str, student: Model
) -> Iterator[Problem]:
    """Yields reasons why a student cannot follow the attention of a teacher."""
    if "teacher/queries" not in student.entries:
        problem = "has no effect on a model whose entries lack 'teacher/queries'"
        kind, remedy = COMPARED["attention"], "use a built-in model"
        yield Problem("distill.attention", kind, problem, remedy)
    remedy = "use another teacher, or set distill.attention to None"
    unlike = [name for name in UNCOMPARED if getattr(teacher, name)]
    unlike += ["attention"] * isinstance(teacher.attention, schema.Sparse)
    for name in unlike:
        problem = f"has model.{name}, which distill.attention does not compare"
        yield Problem("distill.teacher", path, problem, remedy)
    caps = teacher.attention_soft_cap, config.model.attention_soft_cap
    if caps[0] != caps[1]:
        problem = f"has model.attention_soft_cap={caps[0]}, and the model {caps[1]}: "
        problem += "distill.attention compares equal bounds"
        yield Problem("distill.teacher", path, problem, remedy)
    heads = int(teacher.num_heads), int(config.model.num_heads)
    if heads[0] != heads[1] and not config.prune:
        problem = f"has {heads[0]} heads, and the model {heads[1]}: distill.attention "
        problem += "compares equal heads"
        remedy = "start from the teacher by prune, or set distill.attention to None"
        yield Problem("distill.teacher", path, problem, remedy)


def run_with_layers(
    decoder: Decoder, params: Params, batch: Batch, targets: Targets, told: Told
) -> tuple[Any, dict[str, jax.Array]]:
    """Runs a teacher; returns the last stream, and what `targets` tell of layers.

    `states` are [B, L, S, W], `queries` [B, L, S, H, D] and `keys` [B, L, S, KV, D].
    `decoder` has shapes alone, and is changed.
    """
    heads = list[tuple[jax.Array, jax.Array]]()
    for blocks in segments_of(decoder.blocks).values():
        layers_of(blocks)[-1].on_heads = lambda q, k: heads.append((q, k))
    stack = make_stack(decoder)
    segments = tuple(_telling(segment, heads) for segment in stack.segments)
    telling = dataclasses.replace(stack, segments=segments)
    # One by one: a scan would keep the streams of all blocks.
    carry, auxiliaries = run_stack(telling, params, batch, None)
    chosen = [auxiliaries[number].metrics for number in targets.blocks]
    found = dict[str, jax.Array]()
    if told.states:
        streams = [x[_STREAM] for x in chosen]
        if targets.channels is not None:
            streams = [x[..., jnp.asarray(targets.channels)] for x in streams]
        found["states"] = jnp.stack(streams, 2)
    if told.heads:
        pairs = [(x[_QUERIES], x[_KEYS]) for x in chosen]
        if targets.groups is not None:
            pairs = [*map(_select_groups, pairs, targets.groups)]
        queries, keys = zip(*pairs, strict=True)
        found |= {"queries": jnp.stack(queries, 2), "keys": jnp.stack(keys, 2)}
    return carry, found


def _select_groups(
    heads: tuple[jax.Array, jax.Array], groups: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Selects groups of heads of queries and keys."""
    (q, k), chosen = heads, jnp.asarray(groups)
    by_group = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])[:, :, chosen]
    return by_group.reshape(*q.shape[:2], -1, q.shape[3]), k[:, :, chosen]


def _telling(segment: Segment, heads: list[tuple[jax.Array, jax.Array]]) -> Segment:
    """Returns a segment whose blocks also return the stream behind them, and heads."""

    def block(*given: Any) -> tuple[jax.Array, Auxiliary]:
        heads.clear()
        carry, _ = segment.block(*given)
        told = zip((_QUERIES, _KEYS), heads[0], strict=True)
        return carry, Auxiliary(metrics={_STREAM: carry, **dict(told)})

    return dataclasses.replace(segment, block=block, tiles=None)
