"""Blocks that a microbatch runs, one program each, and the tokens of each block."""

from typing import Any

import jax
import numpy as np

from zjax.offload.programs import BlockInputs, BlockPrograms
from zjax.stack.dropping import drops_tokens
from zjax.typing import NOTHING_DROPPED, Dropping


class Route:
    """The inputs of the blocks of one microbatch.

    Blocks from `first` to `last` run on one subset of the tokens; without such a span
    both are -1. The host draws the layers, so that dropped layers are not even loaded.

    Args:
        programs: Programs of the model.
        num_blocks: Number of blocks of the model.
        key: Random key of the microbatch; None in evaluation.
        dropping: Settings of layers and tokens that the step drops.
    """

    def __init__(
        self,
        programs: BlockPrograms,
        num_blocks: int,
        key: jax.Array | None,
        dropping: Dropping,
    ):
        self._programs, self._num_blocks = programs, num_blocks
        self._key, self._dropping = key, dropping
        self._context: Any = None
        self._span_context: Any = None
        self._indices: jax.Array | None = None
        self._others: Any = None
        self.first = self.last = -1
        self._are_kept = self._probabilities = None
        if key is not None and dropping.theta is not None:
            drawn = programs.draw_layers(num_blocks, key, dropping.theta)
            self._are_kept, self._probabilities = map(np.asarray, drawn)

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        return self._are_kept is None or bool(self._are_kept[block])

    def start(self, carry: Any, context: Any) -> None:
        """Draws the tokens of a span, from the stream that enters the first block."""
        self._context, dropping = context, self._dropping
        # Blocks of a span run on tokens that are selected already.
        self._dropping = NOTHING_DROPPED
        # The first and the last block run on all tokens: fewer than 3 blocks drop
        # nothing.
        if self._num_blocks < 3 or not drops_tokens(dropping, carry, self._key):
            return
        if not dropping.once:
            self._dropping = Dropping(dropping.num_kept)
        else:
            self._indices, self._span_context = self._programs.span(
                dropping.num_kept, carry, context, self._key
            )
            self.first, self.last = 1, self._num_blocks - 2

    def inputs_of(self, block: int) -> BlockInputs:
        """Returns a block's inputs; the first and the last block run on all tokens."""
        is_inner = 0 < block < self._num_blocks - 1
        return BlockInputs(
            self._span_context if self.first <= block <= self.last else self._context,
            self._key,
            block,
            self._dropping if is_inner else NOTHING_DROPPED,
            None if self._probabilities is None else self._probabilities[block],
        )

    def narrow(self, stream: Any) -> Any:
        """Selects the tokens of the span; keeps all tokens for `widen`."""
        self._others = stream
        return self._programs.take(stream, self._indices)

    def widen(self, subset: Any) -> Any:
        """Puts the tokens of the span back among all tokens."""
        others, self._others = self._others, None
        return self._programs.replace(others, subset, self._indices)
