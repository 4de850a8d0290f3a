"""Frozen parameters: stored as they are used, without all that training adds.

A frozen parameter has no master weight, no optimizer state and no gradient: it is
stored once, in the compute dtype and the sharding of compute parameters. In trees of
gradients and of optimizer state None stands for it, which JAX counts as no leaf.
"""

import dataclasses
from typing import Any

import jax

from zjax.settings.parameters import is_held_frozen
from zjax.settings.schema import Config
from zjax.sharding.layers import is_layers
from zjax.sharding.placement import ArrayPlan


def hold_frozen(master: Any, compute: Any, config: Config) -> Any:
    """Stores the frozen ones among the master weights as compute parameters."""

    def one(row: ArrayPlan, used: ArrayPlan) -> ArrayPlan:
        if not is_held_frozen(row.path, config):
            return row
        return dataclasses.replace(used, is_frozen=True, follows="nothing")

    return jax.tree.map(one, master, compute)


def trained(tree: Any, rows: Any) -> Any:
    """A tree with None in place of each frozen parameter."""

    def one(row: Any, x: Any) -> Any:
        return None if _is_frozen(row) else x

    return jax.tree.map(one, rows, tree, is_leaf=is_layers)


def frozen(tree: Any, rows: Any) -> Any:
    """A tree with None in place of each parameter that is trained, as `trained`."""

    def one(row: Any, x: Any) -> Any:
        return x if _is_frozen(row) else None

    return jax.tree.map(one, rows, tree, is_leaf=is_layers)


def joined(of_trained: Any, whole: Any, rows: Any) -> Any:
    """The inverse of `trained`, with the frozen parameters of another tree."""

    def one(row: Any, x: Any, old: Any) -> Any:
        return old if _is_frozen(row) else x

    return jax.tree.map(one, rows, of_trained, whole, is_leaf=is_layers)


def _is_frozen(row: Any) -> bool:
    return (row[0] if is_layers(row) else row).is_frozen
