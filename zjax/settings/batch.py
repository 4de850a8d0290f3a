"""Resolves batch sizes: global = microbatch x microbatches x shards, or elastic."""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.settings.ranges import MAX_ROWS

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1_260, 1_680),
    *(2_520, 5_040, 7_560, 10_080, 15_120, 20_160, 25_200, 27_720, 45_360, 50_400),
    *(55_440, 83_160, 110_880, 166_320, 221_760, 277_200, 332_640, 498_960),
    *(554_400, 665_280, 720_720),
)
"""Numbers with more divisors than any smaller number (a subset, as in DeepSpeed)."""
_MAX_LISTED = 40


def elastic_batch(settings: schema.Elasticity, num_shards: int) -> tuple[int, int]:
    """Elastic global batch size, and the largest microbatch size that divides it.

    Numbers of shards that divide the batch train with equal batch sizes. Further
    numbers are refused; with `shards_per_node` they get a separate batch size.
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
    """Refuses microbatch sizes and limits that no batch can satisfy."""
    sizes, limit = settings.microbatch_sizes, settings.max_batch_size
    field = "elasticity.microbatch_sizes"
    if not sizes:
        raise ConfigError(Problem(field, sizes, "names no size", "name some"))
    least = max(sizes) * _per_node(settings)
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
    """Shards per node; 1 under version 0.1 of DeepSpeed's rule."""
    return settings.shards_per_node or 1


def _best_batch(settings: schema.Elasticity, nodes: int) -> tuple[int, list[int]]:
    """Batch per shard of a node that most numbers of nodes divide, and the numbers."""
    sizes, limit = settings.microbatch_sizes, settings.max_batch_size // nodes
    low = settings.min_shards // nodes or 1
    high = settings.max_shards // nodes or limit // min(sizes)
    bases = (*sizes, math.lcm(*sizes))
    candidates = {_multiple(base, limit) for base in bases if base <= limit}
    best, found = min(sizes), list[int]()
    # The first of equally good sizes wins: the order decides between large and small.
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
    """Numbers of shards that divide a batch, by at least one microbatch size."""
    most = [size // each for each in sizes if size % each == 0]
    # Divisors come in pairs around the square root.
    small = range(1, math.isqrt(max(most, default=0)) + 1)
    pairs = [(n, total // n) for total in most for n in small if total % n == 0]
    return sorted({n for pair in pairs for n in pair if low <= n <= high})


def _batch_of(settings: schema.Elasticity, num_shards: int) -> int:
    """Batch of DeepSpeed's version 0.2 for shards that `_best_batch` does not serve."""
    steps = [size * num_shards for size in settings.microbatch_sizes]
    sizes = [settings.max_batch_size // step * step for step in steps]
    return max(sizes) if settings.prefer_larger else min(sizes)


def _misfit(
    settings: schema.Elasticity, num_shards: int, total: int, valid: list[int]
) -> Problem:
    """Problem of a number of shards that does not divide the elastic batch."""
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


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Sizes into which a global batch is divided."""

    global_batch_size: int
    """Sequences per optimizer step."""
    num_microbatches: int
    """Microbatches per step, whose gradients are summed."""
    microbatch_size: int
    """Sequences per batch shard and microbatch."""


def resolve_batch(config: schema.Config, num_shards: int) -> BatchSizes:
    """Derives batch settings that are 0, and refuses contradictions.

    `num_shards` is the product of the mesh axes that shard the batch, 1 or more.
    """
    if config.elasticity:
        return _resolve_elastic(config.elasticity, config, num_shards)
    global_size = config.global_batch_size
    count, size = config.num_microbatches, config.microbatch_size
    shards = f"{num_shards} batch shards"
    if not global_size and not size:
        remedy = "set global_batch_size or microbatch_size"
        problem = "gives no batch size, nor does microbatch_size=0"
        raise ConfigError(Problem("global_batch_size", global_size, problem, remedy))
    if not global_size:
        count = count or 1
        return BatchSizes(count * size * num_shards, count, size)
    if count and size:
        product = count * size * num_shards
        if global_size != product:
            problem = (
                f"is not num_microbatches={count} x microbatch_size={size} x {shards}"
            )
            remedy = f"use {product}, or 0 to derive it"
            raise ConfigError(
                Problem("global_batch_size", global_size, problem, remedy)
            )
        return BatchSizes(global_size, count, size)
    known = size or count or 1
    derived, remainder = divmod(global_size, known * num_shards)
    if remainder:
        given = f"microbatch_size={size}" if size else f"num_microbatches={known}"
        problem = f"does not divide by {shards} x {given}"
        remedy = f"use a multiple of {known * num_shards}"
        raise ConfigError(Problem("global_batch_size", global_size, problem, remedy))
    return BatchSizes(global_size, *((derived, size) if size else (known, derived)))


def _resolve_elastic(
    elasticity: schema.Elasticity, config: schema.Config, num_shards: int
) -> BatchSizes:
    """Batch sizes by `elasticity`; refuses batch settings that differ."""
    total, size = elastic_batch(elasticity, num_shards)
    sizes = BatchSizes(total, total // (size * num_shards), size)
    given = {name: getattr(config, name) for name in dataclasses.asdict(sizes)}
    problems = [
        Problem(
            name,
            value,
            f"is not the {getattr(sizes, name)} of elasticity on {num_shards} shards",
            "use 0",
        )
        for name, value in given.items()
        if value not in (0, getattr(sizes, name))
    ]
    if problems:
        raise ConfigError(*problems)
    return sizes
