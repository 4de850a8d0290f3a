"""Batch sizes that many numbers of devices divide, as DeepSpeed computes them.

A microbatch size, or the least common multiple of all, times a highly composite number
is a batch that many numbers of batch shards divide. Version 0.1 of DeepSpeed counts
shards; version 0.2 counts nodes, and falls back to a batch for the shards there are.
"""

import bisect
import math
from collections.abc import Sequence

from zjax.config import schema
from zjax.config.ranges import MAX_ROWS
from zjax.errors import ConfigError, Problem

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1_260, 1_680),
    *(2_520, 5_040, 7_560, 10_080, 15_120, 20_160, 25_200, 27_720, 45_360, 50_400),
    *(55_440, 83_160, 110_880, 166_320, 221_760, 277_200, 332_640, 498_960),
    *(554_400, 665_280, 720_720),
)
"""Numbers with more divisors than any smaller one (some are left out)."""
_MAX_LISTED = 40
"""Numbers of shards that an error lists."""


def elastic_batch(settings: schema.Elasticity, num_shards: int) -> tuple[int, int]:
    """The global batch size, and the largest microbatch size that divides it.

    Args:
        settings: With microbatch sizes.
        num_shards: Batch shards of the run, 1 or more.

    Raises:
        ConfigError: The shards do not divide the batch, or sizes exceed the limit.

    Example:
        >>> sizes = schema.Elasticity(microbatch_sizes=(2, 4, 6), max_batch_size=100)
        >>> elastic_batch(sizes, num_shards=12)
        (96, 4)
    """
    _check_sizes(settings)
    sizes, nodes = settings.microbatch_sizes, _per_node(settings)
    size, numbers = _best_batch(settings, nodes)
    total, valid = size * nodes, [number * nodes for number in numbers]
    if settings.shards_per_node and num_shards not in valid:
        total, valid = _batch_of(settings, num_shards), [num_shards]
    if num_shards not in valid or not total:
        raise ConfigError(_misfit(settings, num_shards, total, valid))
    fitting = [each for each in sizes if total // num_shards % each == 0]
    if not fitting:
        raise ConfigError(_misfit(settings, num_shards, total, valid))
    return total, max(fitting)


def _check_sizes(settings: schema.Elasticity) -> None:
    sizes, limit = settings.microbatch_sizes, settings.max_batch_size
    field, least = "elasticity.microbatch_sizes", max(sizes) * _per_node(settings)
    if min(sizes) < 1:
        raise ConfigError(Problem(field, sizes, "has one below 1", "use 1 or more"))
    if (multiple := math.lcm(*sizes)) > MAX_ROWS:
        problem = f"has a common multiple of {multiple}, above {MAX_ROWS}"
        raise ConfigError(
            Problem(field, sizes, problem, "use sizes that share factors")
        )
    if limit < least:
        problem = f"is below {least}, of the largest microbatches of a node"
        field = "elasticity.max_batch_size"
        raise ConfigError(Problem(field, limit, problem, f"use {least} or more"))
    if (most := settings.max_shards) < (fewest := settings.min_shards):
        problem = f"is below elasticity.min_shards={fewest}"
        field = "elasticity.max_shards"
        raise ConfigError(Problem(field, most, problem, f"use {fewest} or more"))


def _per_node(settings: schema.Elasticity) -> int:
    return settings.shards_per_node or 1


def _best_batch(settings: schema.Elasticity, nodes: int) -> tuple[int, list[int]]:
    """The batch, for each of `nodes` shards, that most numbers of nodes divide."""
    sizes, limit = settings.microbatch_sizes, settings.max_batch_size // nodes
    low = settings.min_shards // nodes or 1
    high = settings.max_shards // nodes or limit // min(sizes)
    bases = (*sizes, math.lcm(*sizes))
    candidates = {_multiple(base, limit) for base in bases if base <= limit}
    best, found = min(sizes), list[int]()
    for size in sorted(candidates, reverse=settings.prefer_larger):
        numbers = _divisors(size, sizes, low, high)
        if len(numbers) > len(found):
            best, found = size, numbers
    return best, found


def _multiple(base: int, limit: int) -> int:
    """Multiplies a base by the largest highly composite number within the limit."""
    index = bisect.bisect_right(HIGHLY_COMPOSITE, limit // base)
    return HIGHLY_COMPOSITE[index - 1] * base


def _divisors(size: int, sizes: Sequence[int], low: int, high: int) -> list[int]:
    """Numbers of shards that a batch divides into, for one of the microbatch sizes."""
    most = [size // each for each in sizes if size % each == 0]
    small = range(1, math.isqrt(max(most, default=0)) + 1)
    pairs = [(n, total // n) for total in most for n in small if total % n == 0]
    return sorted({n for pair in pairs for n in pair if low <= n <= high})


def _batch_of(settings: schema.Elasticity, num_shards: int) -> int:
    """The batch of version 0.2 where nodes of other numbers would be needed."""
    steps = [size * num_shards for size in settings.microbatch_sizes]
    sizes = [settings.max_batch_size // step * step for step in steps]
    return max(sizes) if settings.prefer_larger else min(sizes)


def _misfit(
    settings: schema.Elasticity, num_shards: int, total: int, valid: list[int]
) -> Problem:
    field = "elasticity.microbatch_sizes"
    given = settings.microbatch_sizes
    if not total:
        problem = (
            f"has no batch up to {settings.max_batch_size} for {num_shards} shards"
        )
        return Problem(field, given, problem, "use a larger elasticity.max_batch_size")
    listed = ", ".join(map(str, valid[:_MAX_LISTED]))
    more = ", ..." if len(valid) > _MAX_LISTED else ""
    problem = f"makes batches of {total}, which {num_shards} shards do not divide"
    remedy = f"use {listed}{more} batch shards" if valid else "use other sizes"
    return Problem(field, given, problem, remedy)
