"""Records of the experts of tokens, beside the keys of the tokens in pages.

The host has for each page what the device has: the experts of the pass that wrote the
keys last. A prefix that is found in the cache brings its experts along, a draft that
was wrong is written over, and so is a page that gets another owner.

Where a sequence gave its pages away and read tokens again, later tokens were drawn from
the keys of the last pass, and their keys differ with the experts. So the record of a
token is of the last pass that read the token.
"""

from collections.abc import Sequence as List
from typing import Any

import numpy as np

from zjax.generation.plan import Place, Plan
from zjax.generation.pool import Pool
from zjax.generation.sequence import Sequence


class Records:
    """Experts of the tokens of all pages, and of sequences that ask for them.

    Args:
        pools: Pages of the cache of each data shard.
    """

    def __init__(self, pools: List[Pool]):
        self._page_size = pools[0].page_size
        self._num_cells = [pool.num_pages * pool.page_size for pool in pools]
        self._cells: list[np.ndarray] = []

    def add(self, plan: Plan, experts: List[np.ndarray]) -> None:
        """Adds what a pass returned, in the order of passes; see `Chosen.experts`."""
        # [pieces, tokens, layers with experts, experts of a token], step after step.
        kinds = [np.concatenate([*steps], axis=1) for steps in experts]
        if not self._cells:
            sizes, dtype = kinds[0].shape[2:], kinds[0].dtype
            # The system gives memory to pages that are written.
            self._cells = [np.zeros((n, *sizes), dtype) for n in self._num_cells]
        starts = dict[Sequence, int]()
        for place in plan.places:
            starts.setdefault(place.sequence, place.recorded.start)
        for shard, admitted in enumerate(plan.admitted):
            for slot, sequence in admitted:
                if sequence.records:  # tokens before the first were found in the cache
                    self._copy(plan, shard, slot, sequence, starts[sequence])
        for place in plan.places:
            if place.recorded:
                self._write(plan, place, kinds)

    def _copy(
        self, plan: Plan, shard: int, slot: int, sequence: Sequence, num_found: int
    ) -> None:
        """Copies the experts of tokens that were found in the cache to a sequence."""
        cells = self._cells[shard]
        if sequence.experts is None:
            most = len(sequence.prompt) + sequence.max_new_tokens
            sequence.experts = np.zeros((most, *cells.shape[1:]), cells.dtype)
        found = range(num_found)
        sequence.experts[:num_found] = cells[self._find(plan, shard, slot, found)]

    def _write(self, plan: Plan, place: Place, kinds: List[np.ndarray]) -> None:
        """Writes the experts of tokens that a piece read to sequence and pages."""
        size, read = plan.size, place.recorded
        piece, values, number = plan.lanes, kinds[0], size.lane_at(place.column)
        if number is None:
            piece, values, number = plan.chunks, kinds[1], size.chunk_at(place.column)
        new = values[number, : len(read)]
        place.sequence.experts[read.start : read.stop] = new
        shard = place.column // (size.lanes + size.chunks)
        slot = piece.slots[number]
        self._cells[shard][self._find(plan, shard, slot, read)] = new

    def _find(self, plan: Plan, shard: int, slot: Any, positions: range) -> np.ndarray:
        """Returns the cells of positions of the sequence in a slot."""
        places = np.arange(positions.start, positions.stop)
        pages = plan.tables[shard][slot, places // self._page_size]
        return pages * self._page_size + places % self._page_size


def experts_of(sequence: Sequence) -> np.ndarray | None:
    """Returns the experts of all tokens but the last, which no pass has to read."""
    if sequence.experts is None:
        return None
    return sequence.experts[: len(sequence.tokens) - 1]
