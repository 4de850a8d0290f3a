"""The batch triad: whole batch = microbatch size x microbatches x shares of the batch.

Any two of the settings give the third; the whole batch alone means one microbatch.
"""

import dataclasses

from zjax.config import schema
from zjax.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """How a global batch is cut."""

    global_batch_size: int
    """Sequences per optimizer step."""
    num_microbatches: int
    """Parts of a step whose gradients are summed."""
    microbatch_size: int
    """Sequences per share of the batch and microbatch."""


def resolve_batch(config: schema.Config, num_shards: int) -> BatchSizes:
    """Derives the missing one of the three batch settings and checks that they agree.

    Args:
        config: Its `global_batch_size`, `num_microbatches` and `microbatch_size` are 0
            where they are to be derived.
        num_shards: Shares of the batch: the product of the mesh axes that split it, 1
            or more.

    Returns:
        The three sizes; the first is the product of the others and `num_shards`.

    Raises:
        ConfigError: They contradict each other, or too few are given.

    Example:
        >>> resolve_batch(schema.Config(global_batch_size=32), num_shards=8)
        BatchSizes(global_batch_size=32, num_microbatches=1, microbatch_size=4)
    """
    whole = config.global_batch_size
    count, size = config.num_microbatches, config.microbatch_size
    shares = f"{num_shards} shares of the batch"
    if not whole and not size:
        remedy = "set global_batch_size or microbatch_size"
        problem = "leaves the batch open, like microbatch_size=0"
        raise ConfigError(Problem("global_batch_size", whole, problem, remedy))
    if not whole:
        count = count or 1
        return BatchSizes(count * size * num_shards, count, size)
    if count and size:
        product = count * size * num_shards
        if whole != product:
            problem = (
                f"is not num_microbatches={count} x microbatch_size={size} x {shares}"
            )
            remedy = f"use {product}, or 0 to derive it"
            raise ConfigError(Problem("global_batch_size", whole, problem, remedy))
        return BatchSizes(whole, count, size)
    known = size or count or 1
    derived, left = divmod(whole, known * num_shards)
    if left:
        given = f"microbatch_size={size}" if size else f"num_microbatches={known}"
        problem = f"does not divide by {shares} x {given}"
        remedy = f"use a multiple of {known * num_shards}"
        raise ConfigError(Problem("global_batch_size", whole, problem, remedy))
    return BatchSizes(whole, *((derived, size) if size else (known, derived)))
