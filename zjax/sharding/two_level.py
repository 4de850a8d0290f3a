"""ZeRO++: plans of arrays on two levels of links, inside the nodes and across them.

`mesh.replica` joins the nodes, `mesh.data` the devices of one node. Arrays that gain
nothing keep the plan of ZeRO-3: those too small to be sharded, vectors, shards of less
than `MIN_CODED_ELEMENTS`, and, without a secondary partition, dims that the devices do
not divide.

Reference: ZeRO++, arXiv:2306.10209, section 3.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.sharding.mesh import REPLICA, num_shares
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.rules import axes_of, entry

MIN_CODED_ELEMENTS = 2_048
"""Smallest shard, per layer, that is moved by a codec: one block of int8."""


def plan_compute(rows: Any, config: Config) -> Any:
    """Plans of the compute parameters of ZeRO-3, by the settings of ZeRO++.

    Args:
        rows: Tree of `ArrayPlan`, stored as the master weights.
        config: Settings; read for `zero`.

    Returns:
        The tree, with codecs and secondary partitions where they apply.
    """
    zero = config.zero
    coded = plan_codec(rows, "int8") if zero.quantized_weights else rows
    return jax.tree.map(_in_node, coded) if zero.secondary_partition else coded


def plan_grads(rows: Any, config: Config) -> Any:
    """Plans of the reduced gradients of ZeRO-3, by the settings of ZeRO++."""
    return plan_codec(rows, "int4") if config.zero.quantized_gradients else rows


def check_effect(rows: Any, compute: Any, grads: Any, config: Config) -> None:
    """Refuses settings of ZeRO++ that change the plan of no array.

    Args:
        rows: Tree of `ArrayPlan`, what `plan_compute` was given.
        compute: What it returned.
        grads: What `plan_grads` returned.
        config: Settings; read for `zero`.

    Raises:
        PlanError: Names each such setting.
    """
    pairs = zip(*map(jax.tree.leaves, (rows, compute)), strict=True)
    coded = f"codes nothing: no matrix has shards of {MIN_CODED_ELEMENTS:,} elements"
    whole = "moves nothing: no array is sharded in a dim that the devices divide"
    effects = (
        ("secondary_partition", whole, any(x.stored != y.stored for x, y in pairs)),
        ("quantized_weights", coded, any(x.codec for x in jax.tree.leaves(compute))),
        ("quantized_gradients", coded, any(x.codec for x in jax.tree.leaves(grads))),
    )
    remedy = "use False, a smaller zero.min_shard_elements or a larger model"
    problems = [
        Problem(f"zero.{name}", True, problem, remedy)
        for name, problem, has_effect in effects
        if getattr(config.zero, name) and not has_effect
    ]
    if problems:
        raise PlanError(*problems)


def plan_codec(rows: Any, codec: str) -> Any:
    """Gives a codec to the arrays of a tree that are large enough."""

    def one(row: ArrayPlan) -> ArrayPlan:
        is_stack = row.num_layers > 0
        shard = math.prod(row.stored.shard_shape(row.stored_shape))
        is_small = shard // max(1, row.num_layers) < MIN_CODED_ELEMENTS
        is_vector = len(row.shape) - is_stack < 2
        is_split = any(REPLICA in axes for axes in row.gathered_axes)
        is_coded = is_split and not is_small and not is_vector
        return dataclasses.replace(row, codec=codec) if is_coded else row

    return jax.tree.map(one, rows)


def _in_node(row: ArrayPlan) -> ArrayPlan:
    """Stores an array once per node, unless that would change its padding."""
    dims = axes_of(row.spec, len(row.shape))
    for size, axes in zip(row.shape, dims, strict=True):
        if REPLICA in axes and size % num_shares(row.stored.mesh, axes):
            return row
    kept = (tuple(axis for axis in axes if axis != REPLICA) for axes in dims)
    stored = row.stored.update(spec=PartitionSpec(*map(entry, kept)))
    return dataclasses.replace(row, stored=stored)
