"""The sparsity rule of a user's own array."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from zjax_kernels.errors import describe, invalid
from zjax_kernels.sparse.bits import Bits
from zjax_kernels.sparse.layout import Pattern
from zjax_kernels.sparse.sparsity_config import SparsityConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(SparsityConfig):
    """Live blocks as an array; a shorter sequence takes its first blocks.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        live: bool[blocks, blocks] for all heads, or bool[num_heads, blocks, blocks]:
            row r marks the blocks that tokens of block r see. 0 and 1, as of DeepSpeed,
            do too.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> live = np.eye(8, dtype=bool) | np.eye(8, dtype=bool)[::-1]
        >>> print(draw_layout(Custom(2, live=live).layout(128)))
        #......#
        .#....#.
        ..#..#..
        ...##...
        ...##...
        ..#..#..
        .#....#.
        #......#

    Reference:
        DeepSpeed, `SparsityConfig.make_layout`, which returns such an array.
    """

    live: np.ndarray = dataclasses.field(compare=False)
    bits: Bits = dataclasses.field(init=False, repr=False)
    """Content of `live`, by which rules are compared."""

    def __post_init__(self):
        live = np.array(self.live)
        live.setflags(write=False)
        object.__setattr__(self, "live", live)
        object.__setattr__(self, "bits", Bits.of(live))
        super().__post_init__()

    def problems(self) -> list[str]:
        """Adds problems of `live`."""
        found, live = super().problems(), np.asarray(self.live)
        shape, size = live.shape, live.shape[-1] if live.shape else 0
        if not size or shape not in ((size, size), (self.num_heads, size, size)):
            problem = f"is no layout of {self.num_heads} heads"
            remedy = f"give [blocks, blocks] or [{self.num_heads}, blocks, blocks]"
            found.append(describe("live.shape", shape, problem, remedy))
        invalid_values = live[~np.isin(live, (0, 1))]
        if len(invalid_values):
            remedy = "give True for blocks that live"
            found.append(
                describe("live", invalid_values[0], "is neither 0 nor 1", remedy)
            )
        return found

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Patterns of the first blocks of the array; refuses longer sequences."""
        size = self.live.shape[-1]
        if num_blocks > size:
            tokens = size * self.block
            problem = f"is more than the {size} of live"
            remedy = f"give a larger array, or up to {tokens} tokens, as by "
            remedy += f"max_seq_length={tokens}"
            raise invalid("num_blocks", num_blocks, problem, remedy)

        def pattern_of(head: np.ndarray) -> Pattern:
            rows, columns = np.nonzero(head)
            return Pattern.from_entries(rows, columns, num_blocks, num_blocks)

        heads = self.live[..., :num_blocks, :num_blocks]
        return list(map(pattern_of, heads.reshape(-1, num_blocks, num_blocks)))
