"""Roles of parameters: to follow a gradient, totals of a step, or nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from zjax.errors import ModelError, Problem
from zjax.settings.parameters import FROZEN, Groups, label_of
from zjax.sharding.layers import is_layers
from zjax.sharding.naming import layer_of, path_of
from zjax.sharding.placement import ArrayPlan, Follows
from zjax.typing import Move, Params, Stack, Totals


def hold_frozen(master: Any, compute: Any, is_held: Callable[[str], bool]) -> Any:
    """Replaces plans of `master` by `compute` plans where a path is held frozen."""

    def one(row: ArrayPlan, used: ArrayPlan) -> ArrayPlan:
        if not is_held(row.path):
            return row
        # Stored as used, so that no step casts or gathers it from a master weight.
        return dataclasses.replace(used, is_frozen=True, follows="nothing")

    return jax.tree.map(one, master, compute)


def trained(tree: Any, rows: Any) -> Any:
    """Replaces each frozen parameter of a tree by None; `rows` are master plans."""

    def one(row: Any, x: Any) -> Any:
        return None if _is_frozen(row) else x

    return jax.tree.map(one, rows, tree, is_leaf=is_layers)


def frozen(tree: Any, rows: Any) -> Any:
    """Replaces each trained parameter of a tree by None, the reverse of `trained`."""

    def one(row: Any, x: Any) -> Any:
        return x if _is_frozen(row) else None

    return jax.tree.map(one, rows, tree, is_leaf=is_layers)


def joined(of_trained: Any, whole: Any, rows: Any) -> Any:
    """Fills the gaps of `trained` with the frozen parameters of the tree `whole`."""

    def one(row: Any, x: Any, old: Any) -> Any:
        return old if _is_frozen(row) else x

    return jax.tree.map(one, rows, of_trained, whole, is_leaf=is_layers)


def _is_frozen(row: Any) -> bool:
    # Settings freeze by path, and all layers of a stack have one path.
    return (row[0] if is_layers(row) else row).is_frozen


class MovedParam(NamedTuple):
    """How totals move a parameter."""

    segment: int
    move: Move


def moved_params(stack: Stack | None, params: Params) -> dict[str, MovedParam]:
    """Finds the parameters in `Segment.moves`, by path in the model."""
    if stack is None or not any(segment.moves for segment in stack.segments):
        return {}
    paths = jax.tree_util.tree_map_with_path(
        # `stack.split` cuts a tree of paths as it cuts parameters.
        lambda keys, _: path_of(keys),
        params,
        is_leaf=lambda x: x is None,
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
    """Replaces moved parameters in `updated` by the moves of old `params`."""

    def one(keys: tuple, old: jax.Array, new: jax.Array) -> jax.Array:
        found = moved.get(path_of(keys))
        if found is None:
            return new
        own, layer = totals[found.segment], layer_of(keys)
        if layer is None:
            # A stack: each layer moves by the totals of that layer.
            return jax.vmap(found.move)(old, own)
        # A dynamic index: programs of layers that differ in the index compile once.
        of_layer = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), own
        )
        return found.move(old, of_layer)

    return jax.tree_util.tree_map_with_path(one, params, updated)


def assign_roles(
    rows: Any, stack: Stack | None, groups: Groups, is_held: Callable[[str], bool]
) -> Any:
    """Sets `follows` in the plans of parameters or of gradients.

    A frozen parameter is fixed even if totals would move it.
    """
    moved = moved_params(stack, rows)

    def one(keys: Any, row: ArrayPlan) -> ArrayPlan:
        path = path_of(keys)
        follows = "totals" if path in moved else "gradient"
        if label_of(path, groups) == FROZEN or is_held(path):
            follows = "nothing"
        return dataclasses.replace(row, follows=follows)

    return jax.tree_util.tree_map_with_path(one, rows)


def moves_of(rows: Any, stack: Stack | None) -> dict[str, MovedParam]:
    """Finds how totals move the parameters that follow totals, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    follows = {path_of(keys): row.follows for keys, row in leaves}
    moved = moved_params(stack, rows)
    # Offloaded updates have no rows for frozen parameters.
    return {path: x for path, x in moved.items() if follows.get(path) == "totals"}


def only_followers(tree: Any, rows: Any, follows: Follows) -> Any:
    """Replaces each parameter that does not follow `follows` by None."""
    return jax.tree.map(
        lambda row, x: x if row.follows == follows else None, rows, tree
    )


def with_followers(new: Any, tree: Any, rows: Any, follows: Follows) -> Any:
    """Replaces the parameters that `only_followers` selects by `new` values."""
    return jax.tree.map(
        lambda row, x, new: new if row.follows == follows else x, rows, tree, new
    )
