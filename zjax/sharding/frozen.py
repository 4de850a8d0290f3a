"""Frozen parameters: stored as compute parameters, without master weights.

A frozen parameter has no master weight, no optimizer state and no gradient: it is
stored once, in the compute dtype and the sharding of compute parameters. In trees of
gradients and of optimizer state None stands for it, which JAX counts as no leaf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zjax.sharding.layers import is_layers
from zjax.sharding.placement import ArrayPlan


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
