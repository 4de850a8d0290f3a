"""The batch triad: global batch = microbatch size x microbatches x batch shards.

Any two of the settings give the third; the global batch alone means one microbatch.
`elasticity` gives all three.
"""

import dataclasses

from zjax.config import schema
from zjax.config.elasticity import elastic_batch
from zjax.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """How a global batch is divided."""

    global_batch_size: int
    """Sequences per optimizer step."""
    num_microbatches: int
    """Microbatches per step, whose gradients are summed."""
    microbatch_size: int
    """Sequences per batch shard and microbatch."""


def resolve_batch(config: schema.Config, num_shards: int) -> BatchSizes:
    """Derives the missing one of the three batch settings, and checks that they agree.

    Settings of 0 are derived. `num_shards` is the product of the mesh axes that shard
    the batch, 1 or more.

    Raises:
        ConfigError: They contradict each other, or too few are given.

    Example:
        >>> resolve_batch(schema.Config(global_batch_size=32), num_shards=8)
        BatchSizes(global_batch_size=32, num_microbatches=1, microbatch_size=4)
    """
    if config.elasticity.microbatch_sizes:
        return _resolve_elastic(config, num_shards)
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


def _resolve_elastic(config: schema.Config, num_shards: int) -> BatchSizes:
    total, size = elastic_batch(config.elasticity, num_shards)
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
