"""Rules with a sliding window, under DeepSpeed's names of arguments."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from zjax_kernels.sparse import blocks
from zjax_kernels.sparse.arguments import below, wrong_ranges
from zjax_kernels.sparse.layout import Pattern
from zjax_kernels.sparse.sparsity_config import SparsityConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBird(SparsityConfig):
    """A sliding window, global first blocks, and random ones.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Whether each head draws random blocks of its own.
        num_random_blocks: Random blocks per row, >= 0; a row that may see fewer takes
            them all.
        num_sliding_window_blocks: Blocks of the window, >= 1: half of them, rounded
            down, on either side of the row's own.
        num_global_blocks: First blocks, which see all and are seen from everywhere,
            >= 0.
        seed: Says with the number of the head which blocks are drawn, >= 0.

    Raises:
        ValueError: Arguments that cannot be used, one line each.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(BigBird(2).layout(128)))
        ########
        ###..#..
        #####...
        #.###...
        #.####..
        #...###.
        #....###
        #.....##

    Reference:
        Zaheer et al., "Big Bird: transformers for longer sequences", arXiv:2007.14062.
    """

    different_layout_per_head: bool = False
    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    counts_of_blocks: ClassVar[tuple[str, ...]] = (
        "num_random_blocks",
        "num_sliding_window_blocks",
        "num_global_blocks",
    )

    def problems(self) -> list[str]:
        """What is wrong with the arguments.

        Returns:
            One line for each.
        """
        return [
            *super().problems(),
            *below("num_random_blocks", self.num_random_blocks, 0),
            *below("num_sliding_window_blocks", self.num_sliding_window_blocks, 1),
            *below("num_global_blocks", self.num_global_blocks, 0),
            *below("seed", self.seed, 0),
        ]

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """The window, global blocks and random blocks.

        Args:
            num_blocks: Blocks of the sequence.

        Returns:
            One pattern per head, or one for all.
        """
        visible = self.visible(num_blocks)
        base = blocks.global_pattern(
            blocks.sliding_window(num_blocks, self.num_sliding_window_blocks),
            np.arange(self.num_global_blocks),
            visible,
            horizontal=True,
        )
        return blocks.random_heads(
            base,
            visible,
            self.num_random_blocks,
            seed=self.seed,
            num_patterns=self.num_heads if self.different_layout_per_head else 1,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BSLongformer(SparsityConfig):
    """A sliding window and listed global blocks: Longformer in blocks.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Taken for DeepSpeed's sake; heads are alike.
        num_sliding_window_blocks: Blocks of the window, >= 1: half of them, rounded
            down, on either side of the row's own.
        global_block_indices: Blocks that see all and are seen from everywhere, >= 0;
            those beyond the end of the sequence do not count.
        global_block_end_indices: With it, `global_block_indices` are the starts of
            ranges, and these their ends: the block after the last.

    Raises:
        ValueError: Arguments that cannot be used, one line each.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(BSLongformer(2, global_block_indices=[0, 5]).layout(128)))
        ########
        ###..#..
        ####.#..
        #.####..
        #..###..
        ########
        #....###
        #....###

    Reference:
        Beltagy et al., "Longformer: the long-document transformer", arXiv:2004.05150.
    """

    different_layout_per_head: bool = False
    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_sliding_window_blocks",)

    def problems(self) -> list[str]:
        """What is wrong with the arguments.

        Returns:
            One line for each.
        """
        return [
            *super().problems(),
            *below("num_sliding_window_blocks", self.num_sliding_window_blocks, 1),
            *wrong_ranges(self.global_block_indices, self.global_block_end_indices),
        ]

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """The window and global blocks.

        Args:
            num_blocks: Blocks of the sequence.

        Returns:
            One pattern for all heads.
        """
        return [
            blocks.global_pattern(
                blocks.sliding_window(num_blocks, self.num_sliding_window_blocks),
                blocks.global_blocks(
                    self.global_block_indices, self.global_block_end_indices, num_blocks
                ),
                self.visible(num_blocks),
                horizontal=True,
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSlidingWindow(SparsityConfig):
    """A sliding window alone; unidirectional unless told otherwise.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        num_sliding_window_blocks: Blocks of the window, >= 1: half of them, rounded
            down, on either side of the row's own.

    Raises:
        ValueError: Arguments that cannot be used, one line each.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(LocalSlidingWindow(2).layout(128)))
        +.......
        #+......
        .#+.....
        ..#+....
        ...#+...
        ....#+..
        .....#+.
        ......#+

    Reference:
        Beltagy et al., "Longformer: the long-document transformer", arXiv:2004.05150,
        without its global attention.
    """

    num_sliding_window_blocks: int = 3
    attention: Literal["bidirectional", "unidirectional"] = "unidirectional"

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_sliding_window_blocks",)

    def problems(self) -> list[str]:
        """What is wrong with the arguments.

        Returns:
            One line for each.
        """
        name = "num_sliding_window_blocks"
        return super().problems() + below(name, self.num_sliding_window_blocks, 1)

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """The window of each row.

        Args:
            num_blocks: Blocks of the sequence.

        Returns:
            One pattern for all heads.
        """
        window = blocks.sliding_window(num_blocks, self.num_sliding_window_blocks)
        return [blocks.span_pattern(window, self.visible(num_blocks))]
