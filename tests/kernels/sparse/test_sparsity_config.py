"""Rules of one's own need little, and what cannot work is told all at once."""

import ast
import dataclasses

import numpy as np
import pytest

from tests.support.refusals import listed, value_error
from zjax_kernels.sparse.layout import Pattern
from zjax_kernels.sparse.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)
from zjax_kernels.sparse.sparsity_config import Custom, SparsityConfig

each_class = pytest.mark.parametrize(
    "rule", [Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow]
)


class Own(SparsityConfig):
    """The diagonal, by default; the tests set other patterns."""

    patterns = None

    def heads(self, num_blocks):
        rows = np.arange(num_blocks)
        diagonal = Pattern.from_entries(rows, rows, num_blocks, num_blocks)
        return [diagonal] if self.patterns is None else self.patterns


def pattern_of(live):
    rows, columns = np.nonzero(live)
    return Pattern.from_entries(rows, columns, *np.shape(live))


def test_an_own_rule_needs_one_method():
    live = Own(2).layout(48).to_dense()
    np.testing.assert_array_equal(live, [np.eye(3, dtype=bool)] * 2)


def test_an_own_rule_is_cut_at_the_diagonal(monkeypatch):
    full = pattern_of(np.ones((3, 3)))
    monkeypatch.setattr(Own, "patterns", [full, pattern_of(np.eye(3))])
    live = Own(2, attention="unidirectional").layout(48).to_dense()
    np.testing.assert_array_equal(live, [np.tri(3), np.eye(3)])


def test_arguments_of_an_own_rule_are_declared():
    """Fails if rules that are not equal could be taken for one another."""

    class Shifted(Own):
        def __init__(self, num_heads, shift):
            super().__init__(num_heads)
            self.shift = shift

    with pytest.raises(AttributeError) as error:
        Shifted(2, 3)
    assert str(error.value) == (
        "shift=3 is no field of Shifted, and layouts would not depend on it; make "
        "Shifted a frozen dataclass with the field shift"
    )


def test_the_method_of_deepspeed_is_refused_where_it_is_defined():
    with pytest.raises(TypeError) as error:

        class Ported(Own):
            def make_layout(self, seq_len):
                return np.ones((2, 4, 4))

    assert str(error.value) == (
        "make_layout=Ported.make_layout is DeepSpeed's method, which is not called; "
        "define heads(num_blocks), or give the array that it returns to "
        "zjax_kernels.Custom"
    )


def test_a_rule_without_heads_cannot_be_made():
    with pytest.raises(TypeError, match="heads"):
        SparsityConfig(4)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            [pattern_of(np.eye(3))] * 2,
            "len(heads)=2 is not one of num_heads=4; return one pattern per head, or a "
            "single one for all",
        ),
        (
            [pattern_of(np.eye(3))] * 3 + [pattern_of(np.eye(4))],
            "head=3 is no pattern of 3 rows and columns; build it with "
            "num_rows=num_columns=3",
        ),
        (
            [pattern_of(np.ones((3, 5)))],
            "head=0 is no pattern of 3 rows and columns; build it with "
            "num_rows=num_columns=3",
        ),
        (
            np.ones((3, 3)),
            "type(heads)=ndarray is the result of heads, not a list of patterns; "
            "return [Pattern.from_entries(...)], or give an array to Custom",
        ),
        (
            pattern_of(np.eye(3)),
            "type(heads)=Pattern is the result of heads, not a list of patterns; "
            "return [Pattern.from_entries(...)], or give an array to Custom",
        ),
        (
            [np.eye(3)],
            "head=0 is no pattern of 3 rows and columns; build it with "
            "num_rows=num_columns=3",
        ),
    ],
)
def test_an_own_rule_that_is_wrong_is_told(patterns, message, monkeypatch):
    monkeypatch.setattr(Own, "patterns", patterns)
    with value_error(message):
        Own(4).layout(48)


@each_class
def test_every_problem_of_all_rules_is_told_at_once(rule):
    with value_error(
        "num_heads=0 is not an integer >= 1; give 1 or more\n"
        "block=8 is not a block size; use 16, 32, 64 or 128\n"
        "attention=both is not a direction of attention; "
        "use bidirectional or unidirectional"
    ):
        rule(0, block=8, attention="both")


RULES = (BigBird, BSLongformer, Custom, Fixed, LocalSlidingWindow, Variable)
WRONG = listed("sparsity.txt")


@pytest.mark.parametrize("given", WRONG)
def test_arguments_that_cannot_work_are_told(given):
    """Those of a rule, or its numbers of blocks at the length that is given last."""
    name, arguments, *length = ast.literal_eval(given)
    (rule,) = (rule for rule in RULES if rule.__name__ == name)
    with value_error(WRONG[given]):
        rule(**{"num_heads": 2} | arguments).layout(*length)


@pytest.mark.parametrize("indices", [range(2), np.arange(2), (0, 1)])
def test_lists_of_any_kind_make_one_rule(indices):
    """Fails if equal rules would have layouts of their own, or no hash."""
    given = BSLongformer(2, global_block_indices=indices)
    assert given == BSLongformer(2, global_block_indices=[0, 1])
    assert hash(given) == hash(dataclasses.replace(given))


@pytest.mark.parametrize(
    ("seq_len", "message"),
    [
        (100, "seq_len=100 is not a multiple of block=16; pad it to 112"),
        (7, "seq_len=7 is not a multiple of block=16; pad it to 16"),
        (0, "seq_len=0 is not a number of tokens; give a multiple of block=16"),
        (32.0, "seq_len=32.0 is not a number of tokens; give a multiple of block=16"),
    ],
)
@each_class
def test_other_lengths_are_refused(rule, seq_len, message):
    with value_error(message):
        rule(1).layout(seq_len)
