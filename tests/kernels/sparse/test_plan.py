"""Plans say exactly what layouts say, tile by tile."""

import functools

import numpy as np
import pytest

from tests.kernels.sparse.decoding import decode
from tests.support.refusals import value_error
from zjax_kernels.sparse import schedule as schedules
from zjax_kernels.sparse.layout import BlockLayout
from zjax_kernels.sparse.plan import make_plan
from zjax_kernels.sparse.sequence import make_sequence_plan


def random_live(shape, density=0.3, *, heavy=True, seed=0):
    live = np.random.default_rng(seed).random(shape) < density
    if heavy:
        live[..., :1, :] = True
        live[..., :, 1:2] = True
    return live


def random_mask(shape):
    """Hides single tokens of some blocks, whole rows, and whole blocks."""
    mask = np.ones(shape, bool)
    mask[: shape[0] // 2] = (
        np.random.default_rng(1).random(shape)[: shape[0] // 2] < 0.9
    )
    mask[:, 64:128] = False
    mask[3] = False
    return mask


def tokens_of(layout):
    """The layout as a mask of tokens: the specification."""
    live = layout.to_dense().repeat(layout.block, 1).repeat(layout.block, 2)
    return live & np.tri(*live.shape[1:], dtype=bool) if layout.causal else live


CASES = {
    "16": (16, 24, 24, False),
    "16, causal": (16, 24, 24, True),
    "16, padded": (16, 11, 11, True),
    "32, keys longer": (32, 8, 13, False),
    "64, causal": (64, 9, 9, True),
    "128": (128, 5, 5, False),
    "128, causal": (128, 5, 5, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_each_live_token_is_visited_once(
    monkeypatch, case, head_size, num_kv_heads, has_mask, is_cut
):
    """Fails if a cell is lost, added, cut wrongly, or visited twice."""
    if is_cut:
        monkeypatch.setattr(schedules, "MIN_SPLIT", 128)
        monkeypatch.setattr(schedules, "MAX_ITEM_FRACTION", 0.01)
    block, num_rows, num_columns, causal = CASES[case]
    live = random_live((4, num_rows, num_columns))
    live[2] = live[0]
    live[3, num_rows // 2] = False
    layout = BlockLayout.from_dense(live, block=block, causal=causal)
    expected = tokens_of(layout)
    mask = random_mask(expected.shape[1:]) if has_mask else None
    plan = make_plan(layout, num_kv_heads=num_kv_heads, head_size=head_size, mask=mask)
    expected &= True if mask is None else mask
    queries, keys = decode(plan.queries), decode(plan.keys)
    num_queries, num_keys = expected.shape[1:]
    np.testing.assert_array_equal(queries[:, :num_queries, :num_keys], expected)
    assert queries.sum() == expected.sum()
    group = 4 // num_kv_heads
    heads = keys.reshape(num_kv_heads, plan.keys.num_rows, group, -1)
    heads = heads.transpose(0, 2, 3, 1).reshape(4, -1, plan.keys.num_rows)
    np.testing.assert_array_equal(heads[:, :num_queries, :num_keys], expected)
    assert keys.sum() == expected.sum()
    assert plan.queries.num_slots or plan.keys.num_slots or not is_cut


MAKERS = {
    "whole": make_plan,
    "shares of heads": functools.partial(make_plan, head_shards=2),
    "parts of a sequence": lambda *x, **kw: make_sequence_plan(*x, 4, **kw).plan,
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_plans_for_segments_move_as_many_as_a_copy_can(block, make):
    """Fails if blocks of 16 are gathered one by one: no copy moves so few numbers."""
    live = np.ones((512 // block, 512 // block), bool)
    layout = BlockLayout.from_dense(live, block=block, num_heads=2)
    for segments, unit in ((True, max(block, 32)), (False, block)):
        plan = MAKERS[make](layout, segments=segments)
        assert (plan.queries.column_unit, plan.keys.row_unit) == (unit, unit)


def test_small_blocks_visit_little_that_is_dead():
    """Fails if a tile visits all that lies between the blocks that it sees."""
    rows = np.arange(256)
    live = rows[:, None] // 4 == rows // 4
    live[:, 3::4] = True
    layout = BlockLayout.from_dense(live, block=16, num_heads=1)
    for schedule, most in zip(visited(make_plan(layout)), (0.29, 0.29), strict=True):
        assert schedule <= most


def visited(plan):
    for each in (plan.queries, plan.keys):
        chunks = each.items[each.items[..., 0] >= 0][:, 2].sum()
        yield chunks * 128 * each.chunk / (each.num_rows * each.num_columns)


def window(*, all_seen):
    """A row's own block and the seven before it, the first column, and all of a row."""
    rows = np.arange(128)
    live = np.tril(rows[:, None] - rows < 8)
    live[:, 0] = True
    live[0] |= all_seen
    return live


EVEN = {
    "a long column": (window(all_seen=False), (16, 16), 1.05, 0),
    "a long row too": (window(all_seen=True), (16, 16), 1.05, 0),
    "all as long": (np.ones((128, 128), bool), (16, 16), 1.02, 5),
    "of all lengths, in groups": (np.tri(64, dtype=bool), (32, 8), 1.08, 64),
}
"""Layouts, heads of queries and of keys, the most that a program computes of the mean,
and tiles that are cut."""


@pytest.mark.parametrize(("live", "heads", "most", "num_cut"), EVEN.values(), ids=EVEN)
def test_programs_share_the_work_evenly(live, heads, most, num_cut):
    """Fails if an item is lost, if long rows keep others waiting, if a last round is
    hardly filled, or if more is cut than that takes."""
    layout = BlockLayout.from_dense(live, block=128, num_heads=heads[0])
    plan = make_plan(layout, num_kv_heads=heads[1])
    for num_heads, schedule in zip(heads, (plan.queries, plan.keys), strict=True):
        items, number = schedule.items[0], int(schedule.num_items[0])
        order = schedule.order[: schedule.ends[-1]]
        expected = {
            (head, 0, item) for head in range(num_heads) for item in range(number)
        }
        assert len(order) == len(expected)
        assert set(map(tuple, order.tolist())) == expected
        times = items[order[:, 2], 2] * schedule.chunk + 128  # to begin and to end
        loads = [part.sum() for part in np.split(times, schedule.ends[1:-1])]
        assert max(loads) <= most * np.mean(loads)
        assert np.count_nonzero(schedule.splits[0, :, 0] >= 0) <= num_cut


def test_no_item_is_long_and_the_longest_come_first():
    """Fails if one row that sees everything is left to one program."""
    live = np.eye(512, dtype=bool)
    live[0] = True
    live[:, 0] = True
    plan = make_plan(BlockLayout.from_dense(live, block=128, num_heads=1))
    for schedule in (plan.queries, plan.keys):
        counts = schedule.items[0, : int(schedule.num_items[0]), 2]
        assert max(counts) <= 16 * 128 // schedule.chunk
        assert (np.diff(counts) <= 0).all()
        tile, *slots = schedule.splits[0, 0]
        assert tile == 0
        assert sorted(slots) == list(range(len(slots)))
        assert len(slots) <= schedule.num_slots


def test_random_layouts_of_one_kind_have_plans_of_one_shape():
    """Fails if another seed means another program."""
    shapes = set()
    for seed in range(8):
        live = random_live((128, 128), 0.05, heavy=False, seed=seed)
        plan = make_plan(BlockLayout.from_dense(live, block=128, num_heads=1))
        shapes.add(tuple(x.shape for x in (plan.queries.columns, plan.queries.items)))
    assert len(shapes) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_kv_heads": 4},
            "num_kv_heads=4 does not divide the 6 heads of the layout; give a divisor, "
            "or a layout with other heads",
        ),
        (
            {"num_kv_heads": 1.0},
            "num_kv_heads=1.0 is not an integer >= 1; give 1 or more",
        ),
        ({"head_size": 0}, "head_size=0 is not an integer >= 1; give 1 or more"),
        (
            {"mask": lambda query, key: np.ones((3, 5), bool)},
            "mask.shape=(3, 5) is what the function returns, and does not broadcast to "
            "(4, 64, 64); return one for each pair of a query and a key",
        ),
        (
            # A mask that is added to scores is none of what is seen.
            {"mask": lambda query, key: np.where(query < key, -1e9, 0)},
            "mask.dtype=float64 is what the function returns, not bool; return True "
            "where seen",
        ),
        (
            {"mask": np.ones((64, 128), bool)},
            "mask.shape=(64, 128) differs from the layout's tokens, (128, 128); give "
            "one for all tokens",
        ),
    ],
)
def test_what_makes_no_plan_is_refused(options, message):
    layout = BlockLayout.from_dense(np.ones((2, 2), bool), block=64, num_heads=6)
    with value_error(message):
        make_plan(layout, **options)


def test_chunks_that_are_masked_alike_share_a_mask():
    """Fails if the memory of a mask grows with what repeats."""
    layout = BlockLayout.from_dense(np.eye(16, dtype=bool), block=128, num_heads=1)
    mask = np.tri(2048, dtype=bool)
    plan = make_plan(layout, mask=mask)
    assert len(plan.queries.masks) <= 3


def test_a_mask_may_be_a_function():
    """Fails if a window of tokens is not the window that an array says."""
    rows = np.arange(512)
    window = rows[:, None] - rows < 200
    live = np.ones((8, 8), bool)
    layout = BlockLayout.from_dense(live, block=64, num_heads=2, causal=True)
    plan = make_plan(layout, mask=lambda query, key: query - key < 200)
    expected = tokens_of(layout) & window
    np.testing.assert_array_equal(decode(plan.queries), expected)
    np.testing.assert_array_equal(decode(plan.keys), expected.swapaxes(1, 2))
    assert len(plan.queries.columns) < len(make_plan(layout).queries.columns)


def test_a_mask_may_hide_everything_or_end_early():
    """Fails if a head without visible cells, or a padded length, has no plan."""
    layout = BlockLayout.from_dense(np.ones((3, 3), bool), block=64, num_heads=2)
    nothing = make_plan(layout, mask=np.zeros((192, 192), bool))
    assert not decode(nothing.queries).any()
    documents = np.repeat([0, 1], 96)
    plan = make_plan(layout, mask=lambda query, key: documents[query] == documents[key])
    expected = documents[:, None] == documents
    np.testing.assert_array_equal(decode(plan.queries)[0, :192, :192], expected)


def test_heads_with_fewer_items_have_nothing_to_do():
    """Fails if a program counts what is no item."""
    live = np.zeros((2, 4, 64), bool)
    live[0, 0] = True
    live[1] = True
    plan = make_plan(BlockLayout.from_dense(live, block=128))
    for schedule in (plan.queries, plan.keys):
        items = schedule.items
        assert (items[..., 1:4] >= 0).all()
        assert (items[items[..., 0] < 0] == [-1, 0, 0, 0, -1]).all()
    assert (plan.queries.items[0, : int(plan.queries.num_items[0]), 0] < 0).any()
