"""Decides for each parameter what changes it: its gradient, totals of a step, nothing.

Gradient norms, codecs, replicas that take local steps, and totals that move parameters
all ask `ArrayPlan.follows`.
"""

import dataclasses
from typing import Any

import jax

from zjax.config.groups import FROZEN, is_held_frozen, label_of
from zjax.config.schema import Config
from zjax.sharding.moves import MovedParam, moved_params
from zjax.sharding.paths import path_of
from zjax.sharding.placement import ArrayPlan, Follows
from zjax.typing import Stack


def assign_roles(rows: Any, config: Config, stack: Stack | None) -> Any:
    """Sets `follows` in the plans of parameters or of their gradients.

    A frozen parameter stays where it is even if totals would move it.

    Args:
        rows: Tree of `ArrayPlan` in the structure of the parameters.
        config: Read for `optimizer.groups` and `lora`.
        stack: The model as a line of blocks, whose totals may move parameters.

    Returns:
        The same tree of plans.
    """
    moved = moved_params(stack, rows)

    def one(keys: Any, row: ArrayPlan) -> ArrayPlan:
        path = path_of(keys)
        follows = "totals" if path in moved else "gradient"
        is_frozen = label_of(path, config.optimizer.groups) == FROZEN
        if is_frozen or is_held_frozen(path, config):
            follows = "nothing"
        return dataclasses.replace(row, follows=follows)

    return jax.tree_util.tree_map_with_path(one, rows)


def moves_of(rows: Any, stack: Stack | None) -> dict[str, MovedParam]:
    """Returns how totals move the parameters that follow them, by path.

    Args:
        rows: Tree of `ArrayPlan` of the master weights.
        stack: The model as a line of blocks.
    """
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    follows = {path_of(keys): row.follows for keys, row in leaves}
    moved = moved_params(stack, rows)
    # Offloaded updates have no rows for frozen parameters.
    return {path: x for path, x in moved.items() if follows.get(path) == "totals"}


def only_followers(tree: Any, rows: Any, follows: Follows) -> Any:
    """Returns a tree with None in place of each parameter that follows something else.

    Args:
        tree: One value per parameter.
        rows: Tree of `ArrayPlan` of the master weights.
        follows: What the remaining parameters follow.
    """
    return jax.tree.map(
        lambda row, x: x if row.follows == follows else None, rows, tree
    )


def with_followers(new: Any, tree: Any, rows: Any, follows: Follows) -> Any:
    """Replaces the parameters that `only_followers` selects.

    Args:
        new: Result of `only_followers`, or a tree with a value for every parameter.
        tree: One value per parameter.
        rows: Tree of `ArrayPlan` of the master weights.
        follows: What the replaced parameters follow.
    """
    return jax.tree.map(
        lambda row, x, new: new if row.follows == follows else x, rows, tree, new
    )
