"""Blocks that a microbatch runs, one program each, and the tokens of each block."""

from typing import Any

import jax
import numpy as np

from zjax.offload.programs import BlockInputs, BlockPrograms
from zjax.stack.dropping import inner_blocks, of_block
from zjax.typing import Dropping


class Route:
    """The inputs of the blocks of one microbatch.

    Blocks from `first` to `last` run on one subset of the tokens; without such a span
    both are -1. The host draws the layers, so that dropped layers are not even loaded.

    Args:
        programs: Programs of the model.
        key: Random key of the microbatch; None in evaluation.
        dropping: Settings of layers and tokens that the step drops.
    """

    def __init__(
        self, programs: BlockPrograms, key: jax.Array | None, dropping: Dropping
    ):
        self._programs = programs
        self._key, self._dropping = key, dropping
        self._context = self._span_context = self._indices = self._others = None
        self._inner = inner_blocks(programs.num_blocks, dropping, key)
        self.first = self.last = -1
        self._are_kept = None
        if key is not None and dropping.theta is not None:
            self._are_kept = np.asarray(programs.draw_layers(key, dropping.theta))

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        return self._are_kept is None or bool(self._are_kept[block])

    def start(self, carry: Any, context: Any) -> None:
        """Draws the tokens of a span, from the stream that enters the first block."""
        self._context, inner = context, self._inner
        if self._dropping.once and inner:
            self._indices, self._span_context = self._programs.span(
                self._dropping, self._key, carry, context
            )
            if self._indices is not None:
                self.first, self.last = inner[0], inner[-1]

    def inputs_of(self, block: int) -> BlockInputs:
        """Returns a block's inputs; the first and the last block run on all tokens."""
        in_span = self.first <= block <= self.last
        context = self._span_context if in_span else self._context
        dropping = of_block(self._dropping, block in self._inner)
        return BlockInputs(context, self._key, block, dropping)

    def narrow(self, stream: Any) -> Any:
        """Selects the tokens of the span; keeps all tokens for `widen`."""
        self._others = stream
        return self._programs.take(stream, self._indices)

    def widen(self, subset: Any) -> Any:
        """Puts the tokens of the span back among all tokens."""
        others, self._others = self._others, None
        return self._programs.replace(others, subset, self._indices)
