"""Layouts keep each distinct pattern once, and no block twice."""

import functools

import numpy as np
import pytest

from tests.support.refusals import value_error
from zjax_kernels import sparse
from zjax_kernels.sparse.layout import BlockLayout, Pattern


def random_live(shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.3


def from_heads(live, **given):
    """A layout from patterns built apart."""
    heads = []
    for head in live:
        rows, columns = np.nonzero(head)
        heads.append(Pattern.from_entries(rows, columns, *head.shape))
    return BlockLayout.from_heads(heads, num_columns=live.shape[-1], **given)


def test_entries_may_repeat_in_any_order():
    rows, columns = np.array([2, 0, 2, 2, 0]), np.array([1, 3, 0, 1, 3])
    pattern = Pattern.from_entries(rows, columns, 4, 5)
    assert pattern.starts.tolist() == [0, 1, 1, 3, 3]
    assert pattern.columns.tolist() == [3, 0, 1]
    assert pattern.rows.tolist() == [0, 2, 2]
    assert (pattern.starts.dtype, pattern.columns.dtype) == (np.int64, np.int32)


def test_entries_are_those_of_a_loop():
    for seed in range(50):
        random = np.random.default_rng(seed)
        num_rows, num_columns = random.integers(1, 12, size=2)
        rows = random.integers(0, num_rows, size=30).astype(np.int32)
        columns = random.integers(0, num_columns, size=30)
        pattern = Pattern.from_entries(rows, columns, num_rows, num_columns)
        expected = sorted(set(zip(rows.tolist(), columns.tolist(), strict=True)))
        assert [*zip(pattern.rows, pattern.columns, strict=True)] == expected
        counts = np.bincount([row for row, _ in expected], minlength=num_rows)
        assert np.diff(pattern.starts).tolist() == counts.tolist()


def test_entries_may_lie_beyond_what_int32_counts_or_be_none():
    side = 100_000
    last = np.array([side - 1], np.int32)
    pattern = Pattern.from_entries(last, last, side, side)
    assert (pattern.rows.tolist(), pattern.columns.tolist()) == ([side - 1],) * 2
    none = np.zeros(0, int)
    pattern = Pattern.from_entries(none, none, 2, 2)
    assert (pattern.starts.tolist(), pattern.columns.tolist()) == ([0, 0, 0], [])


@pytest.mark.parametrize("shape", [(3, 6, 6), (1, 4, 9), (2, 9, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_arrays_come_back(shape, causal):
    live = random_live(shape)
    layout = BlockLayout.from_dense(live, block=32, causal=causal)
    expected = live & np.tri(*shape[1:], dtype=bool) if causal else live
    np.testing.assert_array_equal(layout.to_dense(), expected)
    assert (layout.num_heads, layout.num_rows, layout.num_columns) == shape
    assert layout.density == pytest.approx(expected.mean())
    assert layout.causal is causal


def test_one_array_serves_all_heads():
    live = random_live((5, 5))
    layout = BlockLayout.from_dense(live, block=16, num_heads=4)
    np.testing.assert_array_equal(layout.to_dense(), [live] * 4)
    assert (len(layout.patterns), layout.head_patterns) == (1, (0, 0, 0, 0))


@pytest.mark.parametrize("build", [BlockLayout.from_dense, from_heads])
def test_equal_heads_share_a_pattern(build):
    first, second = random_live((2, 6, 6))
    layout = build(np.stack([first, second, first, second]), block=16)
    assert (len(layout.patterns), layout.head_patterns) == (2, (0, 1, 0, 1))


@pytest.mark.parametrize("build", [BlockLayout.from_dense, from_heads])
def test_heads_that_differ_in_the_future_alone_share_a_pattern(build):
    live = np.stack([np.tri(4), np.ones((4, 4))])
    layout = build(live, block=16, causal=True)
    assert (len(layout.patterns), layout.head_patterns) == (1, (0, 0))
    np.testing.assert_array_equal(layout.to_dense(), [np.tri(4)] * 2)


def test_rows_and_layouts_may_be_empty():
    live = np.zeros((2, 4, 4), bool)
    live[1, 2] = True
    layout = BlockLayout.from_dense(live, block=16)
    np.testing.assert_array_equal(layout.to_dense(), live)
    assert layout.density == 4 / 32
    assert layout.patterns[0].starts.tolist() == [0] * 5


FORM = "give [heads, rows, columns], or [rows, columns] and num_heads"


@pytest.mark.parametrize(
    ("live", "num_heads", "message"),
    [
        (np.ones((4, 4)), None, f"live.shape=(4, 4) is not a layout; {FORM}"),
        (
            np.ones((2, 4, 4)),
            3,
            f"live.shape=(2, 4, 4) is not a layout of 3 heads; {FORM}",
        ),
        (np.ones((2, 0, 4)), None, f"live.shape=(2, 0, 4) is not a layout; {FORM}"),
        (np.ones((2, 2)), -1, "num_heads=-1 is not an integer >= 1; give 1 or more"),
        (np.ones((2, 2)), "2", "num_heads='2' is not an integer >= 1; give 1 or more"),
        ([["#", "."]], 1, "live.dtype=<U1 is not bool; give True where a block lives"),
        ([[1.0, np.nan]], 1, "live=nan is neither True nor False; give True or False"),
    ],
)
def test_what_says_no_blocks_is_refused(live, num_heads, message):
    with value_error(message):
        BlockLayout.from_dense(live, block=16, num_heads=num_heads)


TWO = Pattern.from_entries(np.array([0]), np.array([1]), 2, 2)
THREE = Pattern.from_entries(np.array([0]), np.array([1]), 3, 2)


@pytest.mark.parametrize(
    ("heads", "num_columns", "message"),
    [
        ([], 2, "heads=[] is empty; give one pattern per head"),
        (
            [TWO, THREE],
            2,
            "heads=[2, 3] have different numbers of rows; give patterns of one shape",
        ),
        ([TWO], 1, "num_columns=1 has a block in column 1; use 2 or more"),
    ],
)
def test_heads_that_make_no_layout(heads, num_columns, message):
    with value_error(message):
        BlockLayout.from_heads(heads, block=16, num_columns=num_columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 8}, "block=8 is not a block size; use 16, 32, 64 or 128"),
        ({"patterns": ()}, "patterns=[] is empty; give one pattern per head"),
        ({"num_rows": 3}, "num_rows=3 is not that of the patterns; use 2"),
        ({"num_columns": 1}, "num_columns=1 has a block in column 1; use 2 or more"),
        (
            {"head_patterns": (0, 5)},
            "head_patterns=(0, 5) is not from 0 to 0 for each head; number the "
            "patterns from 0",
        ),
    ],
)
def test_layouts_made_by_hand_are_checked(changes, message):
    """Fails if an error comes later, from a plan."""
    given = {"block": 16, "num_rows": 2, "num_columns": 2, "patterns": (TWO,)}
    with value_error(message):
        BlockLayout(**{**given, "head_patterns": (0,), **changes})


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([0, 2], [0, 0], "rows=(0, 2) is not from 0 to 1; number blocks from 0"),
        ([0, 1], [-1, 0], "columns=(-1, 0) is not from 0 to 1; number blocks from 0"),
    ],
)
def test_entries_outside(rows, columns, message):
    with value_error(message):
        Pattern.from_entries(np.array(rows), np.array(columns), 2, 2)


NO_LAYOUTS = {
    "a rule": sparse.BigBird(4),
    "an array": np.ones((2, 2), bool),
    "none": None,
    "a plan": sparse.make_plan(
        BlockLayout.from_dense(np.eye(2), block=64, num_heads=2)
    ),
}


@pytest.mark.parametrize("given", NO_LAYOUTS.values(), ids=NO_LAYOUTS)
@pytest.mark.parametrize(
    "use",
    [
        sparse.make_plan,
        functools.partial(sparse.make_sequence_plan, num_devices=2),
        sparse.draw_layout,
        sparse.plot_layout,
    ],
    ids=["make_plan", "make_sequence_plan", "draw_layout", "plot_layout"],
)
def test_what_is_no_layout_is_refused(use, given):
    with pytest.raises(ValueError) as caught:
        use(given)
    name = type(given).__name__
    assert str(caught.value) == (
        f"layout={name} is not a layout; give rule.layout(seq_len), or "
        "BlockLayout.from_dense(live, ...)"
    )
