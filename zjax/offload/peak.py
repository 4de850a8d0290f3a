"""Memory of a device while the programs of a streamed step run."""

import dataclasses
from typing import Any

import jax

from zjax.sharding.batch import batch_shardings
from zjax.sharding.plan import Plan
from zjax.typing import Entries


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes on one device at one moment of a step.

    Args:
        moment: The program that runs.
        parts: Bytes by name.
    """

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


class UnreportedMemoryError(Exception):
    """The compiler does not report the memory of a program."""


def added_bytes(program: Any, *operands: Any) -> int:
    """Bytes that a jitted function adds to its operands, once compiled."""
    return added_by(program.lower(*operands).compile())


def added_by(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program adds to its operands."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise UnreportedMemoryError
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return results + analysis.temp_size_in_bytes


def like_batch(plan: Plan, tree: Any, entries: Entries | None = None) -> Any:
    """Shapes with the shardings of a batch, or of a stream of activations."""
    return placed(tree, batch_shardings(plan, tree, entries or {}))


def placed(shapes: Any, places: Any) -> Any:
    """Shapes with these shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        places,
    )
