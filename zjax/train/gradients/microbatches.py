"""Splits a global batch into microbatches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.errors import PlanError, Problem
from zjax.sharding.batch import field_of, map_rows, rows_of
from zjax.sharding.paths import path_of
from zjax.typing import Batch, Model


def split_batch(
    batch: Batch, model: Model, num_microbatches: int, num_shares: int
) -> Batch:
    """Splits a batch into microbatches without moving rows between devices.

    Each device splits its rows into microbatches of adjacent rows. For a separable
    loss, which compares no rows, row i is in microbatch i mod N. All meshes then have
    the same microbatches and the same random numbers.

    Args:
        batch: Arrays [B, ...]; scalars and other arrays without rows are repeated.
        model: Says whether its loss is separable, and which arrays hold rows.
        num_microbatches: N, 1 or more.
        num_shares: Devices along the batch dim.

    Returns:
        Arrays [N, B / N, ...].

    Raises:
        PlanError: B does not divide.
    """

    def split(x: jax.Array) -> jax.Array:
        rest = x.shape[1:]
        if model.separable:
            return x.reshape(-1, num_microbatches, *rest).swapaxes(0, 1)
        x = x.reshape(num_shares, num_microbatches, -1, *rest).swapaxes(0, 1)
        return x.reshape(num_microbatches, -1, *rest)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (num_microbatches, *x.shape))

    check_batch(batch, model, num_microbatches, num_shares)
    return map_rows(split, repeat, batch, model.entries)


def row_specs(batch: Batch, model: Model, axes: Sequence[str]) -> Any:
    """A tree of PartitionSpec for `shard_map`, with rows split over `axes`."""
    return map_rows(lambda x: P(tuple(axes)), lambda x: P(), batch, model.entries)


def check_batch(
    batch: Batch, model: Model, num_microbatches: int, num_shares: int
) -> None:
    """Refuses a batch that does not divide over devices and microbatches.

    Args:
        batch: Arrays or their shapes.
        model: Says which of them hold rows.
        num_microbatches: Gradient accumulation, 1 or more.
        num_shares: Devices along the batch dim.

    Raises:
        PlanError: Names every array whose first dim does not divide.
    """
    parts = num_shares * num_microbatches
    problems = [
        Problem(
            field_of(path),
            leaf.shape,
            f"does not divide over {num_shares} shares of {num_microbatches} "
            "microbatches",
            f"use a multiple of {parts} as its first dim",
        )
        for path, leaf in rows_of(batch, model.entries)
        if leaf.shape[0] % parts
    ]
    if problems:
        raise PlanError(*problems)


def check_lengths(batch: Batch, model: Model, num_shares: int) -> None:
    """Refuses a batch whose second dim does not divide over the sequence axis.

    Args:
        batch: Arrays or their shapes.
        model: Says which of them hold rows.
        num_shares: Size of the sequence axis.

    Raises:
        PlanError: Names every array whose second dim does not divide.
    """
    problems = [
        Problem(
            field_of(path),
            leaf.shape,
            f"does not divide over mesh.sequence={num_shares}",
            f"use a multiple of {num_shares} as its second dim, or mesh.sequence=1",
        )
        for path, leaf in rows_of(batch, model.entries)
        if leaf.ndim > 1 and leaf.shape[1] % num_shares
    ]
    if problems:
        raise PlanError(*problems)


def cast_batch(batch: Batch, model: Model, dtype: Any) -> Batch:
    """Casts the inputs of a model, but no targets or weights, to the compute dtype.

    Args:
        batch: Arrays.
        model: Names its inputs.
        dtype: Compute dtype.
    """
    inputs = model.cast or ()

    def cast(keys: Any, x: jax.Array) -> jax.Array:
        return x.astype(dtype) if path_of(keys) in inputs else x

    return jax.tree_util.tree_map_with_path(cast, batch)
