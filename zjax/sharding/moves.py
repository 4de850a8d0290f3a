"""Parameters that follow the totals of a step instead of a gradient."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from zjax.errors import ModelError, Problem
from zjax.sharding.paths import layer_of, path_of
from zjax.typing import Move, Params, Stack, Totals


class MovedParam(NamedTuple):
    """How a parameter moves.

    Args:
        segment: Index of the segment whose totals it follows.
        move: Function of `Segment.moves`.
    """

    segment: int
    move: Move


def moved_params(stack: Stack | None, params: Params) -> dict[str, MovedParam]:
    """The parameters in `Segment.moves`, by their path in the model.

    Args:
        stack: The model as a line of blocks, if it is one.
        params: A tree with the structure of the model's parameters, of which some may
            be None.

    Raises:
        ModelError: A segment moves a parameter that it does not have.
    """
    if stack is None or not any(segment.moves for segment in stack.segments):
        return {}
    paths = jax.tree_util.tree_map_with_path(
        lambda keys, _: path_of(keys), params, is_leaf=lambda x: x is None
    )
    _, trees, _ = stack.split(paths)
    moved: dict[str, MovedParam] = {}
    problems = []
    for i, (segment, tree) in enumerate(zip(stack.segments, trees, strict=True)):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        by_path = {path_of(keys): path for keys, path in leaves}
        for path, move in segment.moves.items():
            if path in by_path:
                moved[by_path[path]] = MovedParam(i, move)
                continue
            problem = f"is no parameter of a block of segment {i}"
            remedy = f"use one of {', '.join(by_path)}"
            problems.append(Problem("Segment.moves", path, problem, remedy))
    if problems:
        raise ModelError(*problems)
    return moved


def move_params(
    params: Params, updated: Params, moved: Mapping[str, MovedParam], totals: Totals
) -> Params:
    """Replaces parameters by what their moves make of them.

    Args:
        params: Parameters before the step; stacked arrays or `Layers`.
        updated: Parameters that the optimizer updated.
        moved: How parameters move, by path.
        totals: Totals over the global batch of the step.

    Returns:
        `updated`, with the moved parameters.
    """

    def one(keys: tuple, old: jax.Array, new: jax.Array) -> jax.Array:
        found = moved.get(path_of(keys))
        if found is None:
            return new
        own, layer = totals[found.segment], layer_of(keys)
        if layer is None:
            return jax.vmap(found.move)(old, own)
        # A dynamic index: programs of layers that differ in it alone compile once.
        of_layer = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), own
        )
        return found.move(old, of_layer)

    return jax.tree_util.tree_map_with_path(one, params, updated)
