"""Sparsity rules, with DeepSpeed's names of rules and arguments.

Unidirectional layouts have no live block above the diagonal, and draw random blocks
from the visible blocks. Draws are seeded: one configuration gives one layout in all
processes.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from zjax_kernels.device import describe
from zjax_kernels.sparse import layout as layouts
from zjax_kernels.sparse.arguments import (
    integer_problems,
    integers_problems,
    range_problems,
)
from zjax_kernels.sparse.layout import Pattern
from zjax_kernels.sparse.sparsity_config import SparsityConfig, count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(SparsityConfig):
    """All blocks, for comparison.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Accepted for DeepSpeed; has no effect.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(Dense(2, attention="unidirectional").layout(128)))
        +.......
        #+......
        ##+.....
        ###+....
        ####+...
        #####+..
        ######+.
        #######+
    """

    different_layout_per_head: bool = False

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern of all visible blocks."""
        visible = self.visible(num_blocks)
        return [layouts.span_pattern((np.zeros_like(visible), visible), visible)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(SparsityConfig):
    """Adjacent windows with global blocks at the end of each.

    A shorter last window has global blocks at the usual place, or at the end of the
    sequence if that is earlier.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Whether heads may differ, see
            `num_different_global_patterns`.
        num_local_blocks: Blocks of a window, >= 1.
        num_global_blocks: Global blocks of a window, a divisor of `num_local_blocks`.
        horizontal_global_attention: Whether global blocks see all blocks; bidirectional
            only.
        num_different_global_patterns: Number of places for global blocks, from 1 to
            `num_local_blocks / num_global_blocks`. Heads take the places in turn: head
            0 the last blocks of the window, head 1 the blocks before, and so on. Above
            1 needs `different_layout_per_head`.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(Fixed(2, num_local_blocks=3).layout(128)))
        ###..#.#
        ###..#.#
        ###..#.#
        ..####.#
        ..####.#
        ..####.#
        ..#..###
        ..#..###

    Reference:
        Child et al., "Generating long sequences with sparse transformers",
        arXiv:1904.10509, the fixed pattern.
    """

    different_layout_per_head: bool = False
    num_local_blocks: int = count(4, least=1)
    num_global_blocks: int = count(1, least=1)
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = count(1, least=1)

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_global_blocks",)

    def problems(self) -> list[str]:
        """Adds problems of the windows."""
        found = super().problems() + _horizontal_problems(self)
        # Checks of windows divide by counts.
        return found + ([] if self._count_problems() else self._window_problems())

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern per head."""
        visible = self.visible(num_blocks)
        windows = layouts.windows(num_blocks, [self.num_local_blocks])
        patterns = [
            layouts.global_pattern(
                windows,
                self._global_blocks(num_blocks, number),
                visible,
                horizontal=self.horizontal_global_attention,
            )
            for number in range(self.num_different_global_patterns)
        ]
        return [patterns[head % len(patterns)] for head in range(self.num_heads)]

    def _global_blocks(self, num_blocks: int, number: int) -> np.ndarray:
        """Returns the global blocks at place `number` of each window, ascending."""
        width, count = self.num_local_blocks, self.num_global_blocks
        starts = np.arange(0, num_blocks, width) + width - (1 + number) * count
        starts = np.minimum(starts, num_blocks - count)
        # Places of the last windows may coincide at the end of the sequence.
        return np.unique(starts[:, None] + np.arange(count))

    def _window_problems(self) -> list[str]:
        """Reports global blocks that do not fit the windows."""
        width, count = self.num_local_blocks, self.num_global_blocks
        number = self.num_different_global_patterns
        name, found = "num_different_global_patterns", []
        if width % count:
            problem = f"does not divide num_local_blocks={width}"
            remedy = "give a divisor of it"
            found.append(describe("num_global_blocks", count, problem, remedy))
        if number > max(width // count, 1):
            problem = (
                f"is more than num_local_blocks / num_global_blocks={width // count}"
            )
            remedy = f"give {width // count} or less"
            found.append(describe(name, number, problem, remedy))
        if number > 1 and not self.different_layout_per_head:
            problem = "needs heads that differ"
            remedy = "set different_layout_per_head=True"
            found.append(describe(name, number, problem, remedy))
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable(SparsityConfig):
    """Adjacent windows of listed sizes, listed global blocks, and random blocks.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Whether each head draws different random blocks.
        num_random_blocks: Random blocks per row, >= 0; all visible blocks if there are
            fewer.
        local_window_blocks: Blocks of each window, >= 1; the last size repeats.
        global_block_indices: Global blocks, >= 0; blocks beyond the sequence are
            ignored.
        global_block_end_indices: One past the end of each range of global blocks, which
            starts at `global_block_indices`; None for single blocks.
        horizontal_global_attention: Whether global blocks see all blocks; bidirectional
            only.
        seed: Seed of the random blocks, >= 0.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> print(draw_layout(Variable(2, local_window_blocks=[2, 3]).layout(128)))
        ##......
        ##......
        #.###...
        #.###...
        #.###...
        #....###
        #....###
        #....###

    Reference:
        Child et al., "Generating long sequences with sparse transformers",
        arXiv:1904.10509, of which this is a generalisation.
    """

    different_layout_per_head: bool = False
    num_random_blocks: int = count(0, least=0)
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    horizontal_global_attention: bool = False
    seed: int = 0

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_random_blocks",)

    def problems(self) -> list[str]:
        """Adds problems of windows, global blocks and the seed."""
        return [
            *super().problems(),
            *self._window_problems(),
            *range_problems(self.global_block_indices, self.global_block_end_indices),
            *_horizontal_problems(self),
            *integer_problems("seed", self.seed, 0),
        ]

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern per head, or one for all."""
        visible = self.visible(num_blocks)
        base = layouts.global_pattern(
            layouts.windows(num_blocks, self.local_window_blocks),
            layouts.global_blocks(
                self.global_block_indices, self.global_block_end_indices, num_blocks
            ),
            visible,
            horizontal=self.horizontal_global_attention,
        )
        return _add_random_blocks(self, base, visible)

    def _window_problems(self) -> list[str]:
        """Reports sizes of windows that are no positive integers."""
        name, sizes = "local_window_blocks", self.local_window_blocks
        if isinstance(sizes, tuple) and not sizes:
            return [describe(name, sizes, "is empty", "give one like [4]")]
        return integers_problems(name, sizes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBird(SparsityConfig):
    """A sliding window, global first blocks, and random blocks.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Whether each head draws different random blocks.
        num_random_blocks: Random blocks per row, >= 0; all visible blocks if there are
            fewer.
        num_sliding_window_blocks: Blocks of the window, >= 1; half, rounded down, on
            either side of the row.
        num_global_blocks: First blocks, which see all and are seen by all, >= 0.
        seed: Seed of the random blocks, >= 0.

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
    num_random_blocks: int = count(1, least=0)
    num_sliding_window_blocks: int = count(3, least=1)
    num_global_blocks: int = count(1, least=0)
    seed: int = count(0, least=0)

    counts_of_blocks: ClassVar[tuple[str, ...]] = (
        "num_random_blocks",
        "num_sliding_window_blocks",
        "num_global_blocks",
    )

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern per head, or one for all."""
        visible = self.visible(num_blocks)
        base = layouts.global_pattern(
            layouts.sliding_window(num_blocks, self.num_sliding_window_blocks),
            np.arange(self.num_global_blocks),
            visible,
            horizontal=True,
        )
        return _add_random_blocks(self, base, visible)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BSLongformer(SparsityConfig):
    """A sliding window and listed global blocks: block-sparse Longformer.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        different_layout_per_head: Accepted for DeepSpeed; has no effect.
        num_sliding_window_blocks: Blocks of the window, >= 1; half, rounded down, on
            either side of the row.
        global_block_indices: Blocks that see all and are seen by all, >= 0; blocks
            beyond the sequence are ignored.
        global_block_end_indices: One past the end of each range of global blocks, which
            starts at `global_block_indices`; None for single blocks.

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
    num_sliding_window_blocks: int = count(3, least=1)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_sliding_window_blocks",)

    def problems(self) -> list[str]:
        """Adds problems of the global blocks."""
        indices, ends = self.global_block_indices, self.global_block_end_indices
        return super().problems() + range_problems(indices, ends)

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern for all heads."""
        return [
            layouts.global_pattern(
                layouts.sliding_window(num_blocks, self.num_sliding_window_blocks),
                layouts.global_blocks(
                    self.global_block_indices, self.global_block_end_indices, num_blocks
                ),
                self.visible(num_blocks),
                horizontal=True,
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSlidingWindow(SparsityConfig):
    """A sliding window alone; unidirectional by default.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        num_sliding_window_blocks: Blocks of the window, >= 1; half, rounded down, on
            either side of the row.

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

    num_sliding_window_blocks: int = count(3, least=1)
    attention: Literal["bidirectional", "unidirectional"] = "unidirectional"

    counts_of_blocks: ClassVar[tuple[str, ...]] = ("num_sliding_window_blocks",)

    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns one pattern for all heads."""
        window = layouts.sliding_window(num_blocks, self.num_sliding_window_blocks)
        return [layouts.span_pattern(window, self.visible(num_blocks))]


def _add_random_blocks(
    config: Variable | BigBird, base: Pattern, visible: np.ndarray
) -> list[Pattern]:
    """Adds random blocks, drawn for each head or once for all heads."""
    num_patterns = config.num_heads if config.different_layout_per_head else 1
    if not config.num_random_blocks:
        return [base] * num_patterns
    # A seed per head: a head draws alike whatever the number of heads.
    seeds = [(config.seed, head) for head in range(num_patterns)]
    return [
        layouts.union(
            base,
            layouts.random_pattern(
                visible, config.num_random_blocks, np.random.default_rng(seed)
            ),
        )
        for seed in seeds
    ]


def _horizontal_problems(config: Fixed | Variable) -> list[str]:
    """Reports horizontal global blocks of unidirectional attention."""
    if not config.horizontal_global_attention or config.attention == "bidirectional":
        return []
    problem = f"cannot be used with attention={config.attention}"
    remedy = "leave it out, or use bidirectional"
    return [describe("horizontal_global_attention", True, problem, remedy)]
