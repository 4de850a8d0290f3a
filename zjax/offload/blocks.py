"""The parameters of blocks, brought up to the devices in the order of their use."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zjax.offload.stream import Load, Stream
from zjax.offload.units import segment_by_block, units_by_block
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, Plan
from zjax.typing import Params, Stack

AHEAD_BYTES = 512 * 10**6
"""On a device, of blocks on their way up, where three blocks are less."""


class BlockStream:
    """Brings up blocks whole or, where they have tiles, unit by unit.

    Args:
        stack: The model as a line of blocks.
        plan: Says where parameters are stored.
    """

    def __init__(self, stack: Stack, plan: Plan):
        self.stack, self.plan = stack, plan
        self.segment_by_block = segment_by_block(stack)
        blocks = units_by_block(stack, plan.compute)
        ends = itertools.accumulate(map(len, blocks))
        self.units_of_block = [range(*pair) for pair in itertools.pairwise([0, *ends])]
        self.unit_rows: list[list[ArrayPlan]] = [
            jax.tree.leaves(unit) for block in blocks for unit in block
        ]
        moved_bytes = max(
            sum(x.device_bytes for x in rows if x.memory != DEVICE)
            for rows in self.unit_rows
        )
        self.stream = Stream(max(3 * moved_bytes, AHEAD_BYTES))

    def units(self, params: Params) -> list[Params]:
        """The units of all blocks, in the order of the forward pass."""
        blocks = units_by_block(self.stack, params)
        return [*itertools.chain.from_iterable(blocks)]

    def announce(self, units: Sequence[Params], names: Sequence[Any]) -> None:
        """Has units come up in this order, and no others."""
        self.stream.begin(())
        self.announce_more(units, names)

    def announce_more(self, units: Sequence[Params], names: Sequence[Any]) -> None:
        """Has units come up in this order, after those announced before."""
        self.stream.extend(
            Load(name, jax.tree.leaves(units[name[1]]), self.unit_rows[name[1]], False)
            for name in names
        )

    @contextlib.contextmanager
    def fetched(
        self, units: Sequence[Params], name: Any
    ) -> Iterator[tuple[Params, list[Any]]]:
        """The parameters of a unit on the devices, for as long as they are used.

        Args:
            units: As they are stored.
            name: As it was announced: the pass, and the number of the unit.

        Yields:
            The parameters, and a list to which to add a result of their last use.
        """
        arrays, num_bytes = self.stream.take(name)
        tokens: list[Any] = []
        yield jax.tree.unflatten(jax.tree.structure(units[name[1]]), arrays), tokens
        for x, row in zip(arrays, self.unit_rows[name[1]], strict=True):
            if row.memory != DEVICE:
                x.delete()
        self.stream.leave(num_bytes, tokens)
