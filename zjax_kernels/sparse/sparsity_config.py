"""Base class of sparsity rules, and the rule of an array of live blocks."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from zjax_kernels.device import describe, invalid, refuse
from zjax_kernels.sparse.arguments import Bits, integer_problems
from zjax_kernels.sparse.layout import BLOCKS, BlockLayout, Pattern

DIRECTIONS = ("bidirectional", "unidirectional")


def count(default: int, *, least: int) -> Any:
    """Returns a field of an integer, `least` or more."""
    return dataclasses.field(default=default, metadata={"least": least})


class _FieldsOnly:
    """Forbids attributes that are not fields: layouts are cached by fields alone."""

    def __setattr__(self, name: str, value: object) -> None:
        rule = type(self).__name__
        problem = f"is no field of {rule}, and layouts would not depend on it"
        remedy = f"make {rule} a frozen dataclass with the field {name}"
        raise AttributeError(describe(name, value, problem, remedy))


@dataclasses.dataclass(frozen=True)
class SparsityConfig(_FieldsOnly, abc.ABC):
    """A rule that says which blocks live, for sequences of any length.

    A subclass defines `heads`; a subclass with arguments is a frozen dataclass that
    extends `problems`. `Custom` takes an array instead.

    Args:
        num_heads: Number of heads, >= 1.
        block: Tokens per side of a block: 16, 32, 64 or 128.
        attention: "bidirectional", or "unidirectional": no block above the diagonal
            lives.
        token_causal: Whether unidirectional attention also masks the blocks on the
            diagonal token by token. If False, tokens see all of the diagonal block, as
            in DeepSpeed. No effect on bidirectional attention.

    Raises:
        ValueError: Invalid arguments, one line each.

    Example:
        >>> from zjax_kernels.sparse.picture import draw_layout
        >>> class Previous(SparsityConfig):
        ...     def heads(self, num_blocks):
        ...         rows = np.arange(num_blocks)
        ...         columns = np.maximum(rows - 1, 0)
        ...         return [Pattern.from_entries(rows, columns, num_blocks, num_blocks)]
        >>> print(draw_layout(Previous(num_heads=2).layout(64)))
        #...
        #...
        .#..
        ..#.
    """

    num_heads: int
    block: int = 16
    _: dataclasses.KW_ONLY
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    token_causal: bool = True

    counts_of_blocks: ClassVar[tuple[str, ...]] = ()
    """Arguments that count blocks of a row, at most those of a sequence."""

    def __init_subclass__(cls, **given: object):
        super().__init_subclass__(**given)
        if "make_layout" in vars(cls):
            name = f"{cls.__name__}.make_layout"
            problem = "is DeepSpeed's method, which is not called"
            remedy = "define heads(num_blocks), or give the array that it returns "
            remedy += "to zjax_kernels.Custom"
            raise TypeError(describe("make_layout", name, problem, remedy))

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _list_as_tuple(getattr(self, field.name))
            # A frozen dataclass; tuples, unlike lists, can be hashed.
            object.__setattr__(self, field.name, value)
        refuse(self.problems())

    @abc.abstractmethod
    def heads(self, num_blocks: int) -> Sequence[Pattern]:
        """Returns the live blocks of each head.

        Args:
            num_blocks: Blocks of the sequence.

        Returns:
            One pattern for all heads, or one per head, of `num_blocks` rows and
            columns. Unidirectional attention drops blocks above the diagonal.
        """

    def problems(self) -> list[str]:
        """Returns problems of the arguments, one line each; subclasses add problems."""
        found = integer_problems("num_heads", self.num_heads, 1)
        if integer_problems("block", self.block, 1) or self.block not in BLOCKS:
            remedy = "use 16, 32, 64 or 128"
            found += [describe("block", self.block, "is not a block size", remedy)]
        if self.attention not in DIRECTIONS:
            remedy = f"use {' or '.join(DIRECTIONS)}"
            problem = "is not a direction of attention"
            found += [describe("attention", self.attention, problem, remedy)]
        return found + self._flag_problems() + self._count_problems()

    def layout(self, seq_len: int) -> BlockLayout:
        """Applies the rule to sequences of one length.

        Args:
            seq_len: Tokens, a multiple of `block`.

        Raises:
            ValueError: The length is invalid, or `heads` returned patterns of another
                length.
        """
        num_blocks = self._num_blocks(seq_len)
        heads = self.heads(num_blocks)
        self._check_heads(heads, num_blocks)
        # `from_heads` drops blocks above the diagonal, also without `token_causal`.
        causal = self.attention == "unidirectional"
        layout = BlockLayout.from_heads(
            list(heads) * (self.num_heads if len(heads) == 1 else 1),
            block=self.block,
            num_columns=num_blocks,
            causal=causal,
        )
        return dataclasses.replace(layout, causal=causal and self.token_causal)

    def visible(self, num_blocks: int) -> np.ndarray:
        """Counts blocks that a row may see, all or up to the row: int64[num_blocks]."""
        if self.attention == "unidirectional":
            return np.arange(1, num_blocks + 1)
        return np.full(num_blocks, num_blocks)

    def _flag_problems(self) -> list[str]:
        """Reports flags that are not bools."""
        found = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (bool, "bool") and not isinstance(value, bool | np.bool_):
                remedy = "give True or False"
                found.append(describe(field.name, value, "is not a bool", remedy))
        return found

    def _count_problems(self) -> list[str]:
        """Reports fields made by `count` that are no integers, or too small."""
        return [
            line
            for field in dataclasses.fields(self)
            if "least" in field.metadata
            for line in integer_problems(
                field.name, getattr(self, field.name), field.metadata["least"]
            )
        ]

    def _num_blocks(self, seq_len: int) -> int:
        """Returns the blocks of a sequence; refuses lengths that do not fit."""
        block = self.block
        if integer_problems("seq_len", seq_len, 1):
            remedy = f"give a multiple of block={block}"
            raise invalid("seq_len", seq_len, "is not a number of tokens", remedy)
        num_blocks = -(-seq_len // block)
        if seq_len % block:
            problem = f"is not a multiple of block={block}"
            raise invalid(
                "seq_len", seq_len, problem, f"pad it to {num_blocks * block}"
            )
        refuse(self._counts_above(num_blocks, seq_len))
        return num_blocks

    def _counts_above(self, num_blocks: int, seq_len: int) -> list[str]:
        """Reports arguments that count more blocks than the sequence has."""
        found = []
        for field in self.counts_of_blocks:
            number = getattr(self, field)
            if number > num_blocks:
                problem = f"is more than the {num_blocks} blocks of seq_len={seq_len}"
                tokens = number * self.block
                remedy = f"give at most {num_blocks}, or seq_len={tokens} or more"
                found.append(describe(field, number, problem, remedy))
        return found

    def _check_heads(self, heads: Sequence[Pattern], num_blocks: int) -> None:
        """Refuses results of `heads` that are not patterns of the sequence."""
        if not isinstance(heads, Sequence):
            problem = "is the result of heads, not a list of patterns"
            remedy = "return [Pattern.from_entries(...)], or give an array to Custom"
            raise invalid("type(heads)", type(heads).__name__, problem, remedy)
        if len(heads) not in (1, self.num_heads):
            problem = f"is not one of num_heads={self.num_heads}"
            remedy = "return one pattern per head, or a single one for all"
            raise invalid("len(heads)", len(heads), problem, remedy)
        for number, pattern in enumerate(heads):
            if not _is_square(pattern, num_blocks):
                problem = f"is no pattern of {num_blocks} rows and columns"
                remedy = f"build it with num_rows=num_columns={num_blocks}"
                raise invalid("head", number, problem, remedy)


def _list_as_tuple(value):
    """Returns lists, ranges and vectors as tuples, other values as given."""
    if isinstance(value, list | range):
        return tuple(value)
    if getattr(value, "ndim", None) == 1:
        return tuple(np.asarray(value).tolist())
    return value


def _is_square(pattern, num_blocks):
    """Whether a value is a pattern of `num_blocks` rows and columns."""
    if not isinstance(pattern, Pattern) or len(pattern.starts) != num_blocks + 1:
        return False
    return not np.any(pattern.columns >= num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(SparsityConfig):
    """Live blocks as an array; a shorter sequence takes the first blocks.

    Args:
        num_heads: As in `SparsityConfig`, like `block`, `attention` and `token_causal`.
        live: bool[blocks, blocks] for all heads, or bool[num_heads, blocks, blocks]:
            row r marks the blocks that tokens of block r see. 0 and 1, as in DeepSpeed,
            stand for False and True.

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
        # Rules are compared by `bits`, which must not fall behind the array.
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
