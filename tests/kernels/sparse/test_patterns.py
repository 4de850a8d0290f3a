"""Rules give the blocks that their words say; an array is a rule like others."""

import dataclasses
import hashlib
import random
import tracemalloc

import numpy as np
import pytest

from tests.kernels.sparse import oracle
from tests.support.refusals import value_error
from zjax_kernels.sparse import layout as layouts
from zjax_kernels.sparse.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)
from zjax_kernels.sparse.sparsity_config import Custom

ATTENTION = ("bidirectional", "unidirectional")
NUM_SAMPLES = 150
MILLION = 1_048_576
each_attention = pytest.mark.parametrize("attention", ATTENTION)
each_class = pytest.mark.parametrize(
    "rule", [Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow]
)
each_random_class = pytest.mark.parametrize("rule", [Variable, BigBird])


def dense_of(config, num_blocks):
    return config.layout(num_blocks * config.block).to_dense()


def samples(seed):
    """Numbers of blocks, each with a way to attend and a source of chance."""
    chance = random.Random(seed)
    for _ in range(NUM_SAMPLES):
        yield chance.randint(1, 24), chance.choice(ATTENTION), chance


def global_arguments(chance):
    indices = [chance.randint(0, 26) for _ in range(chance.randint(0, 3))]
    ends = [index + chance.randint(1, 6) for index in indices]
    given = chance.choice([None, ends])
    return {"global_block_indices": indices, "global_block_end_indices": given}


@each_attention
@pytest.mark.parametrize("num_blocks", [1, 7])
def test_dense_has_all_blocks(num_blocks, attention):
    live = dense_of(Dense(2, attention=attention), num_blocks)
    expected = oracle.dense(num_blocks, attention=attention)
    np.testing.assert_array_equal(live, [expected] * 2)


def test_fixed_follows_its_rule():
    for num_blocks, attention, chance in samples(0):
        count = chance.randint(1, min(3, num_blocks))
        places = chance.randint(1, 4)
        given = {
            "num_local_blocks": count * chance.randint(places, 5),
            "num_global_blocks": count,
            "attention": attention,
            "horizontal_global_attention": attention == "bidirectional"
            and chance.random() < 0.5,
        }
        config = Fixed(
            5,
            different_layout_per_head=places > 1,
            num_different_global_patterns=places,
            **given,
        )
        expected = [
            oracle.fixed(num_blocks, place=head % places, **given) for head in range(5)
        ]
        found = dense_of(config, num_blocks)
        np.testing.assert_array_equal(found, expected, err_msg=f"{config}")


def test_variable_follows_its_rule():
    for num_blocks, attention, chance in samples(1):
        given = {
            "local_window_blocks": [
                chance.randint(1, 6) for _ in range(chance.randint(1, 4))
            ],
            "attention": attention,
            "horizontal_global_attention": attention == "bidirectional"
            and chance.random() < 0.5,
            **global_arguments(chance),
        }
        config = Variable(2, different_layout_per_head=chance.random() < 0.5, **given)
        expected = [oracle.variable(num_blocks, **given)] * 2
        found = dense_of(config, num_blocks)
        np.testing.assert_array_equal(found, expected, err_msg=f"{config}")


def test_sliding_rules_follow_theirs():
    for num_blocks, attention, chance in samples(2):
        given = {
            "num_sliding_window_blocks": chance.randint(1, num_blocks),
            "attention": attention,
        }
        listed = global_arguments(chance)
        first = {"num_global_blocks": chance.randint(0, num_blocks)}
        cases = [
            (LocalSlidingWindow(2, **given), oracle.sliding(num_blocks, **given)),
            (
                BSLongformer(2, **given, **listed),
                oracle.longformer(num_blocks, **given, **listed),
            ),
            (
                BigBird(2, num_random_blocks=0, **given, **first),
                oracle.big_bird(num_blocks, **given, **first),
            ),
        ]
        for config, expected in cases:
            found = dense_of(config, num_blocks)
            np.testing.assert_array_equal(found, [expected] * 2, err_msg=f"{config}")


GOLDEN = [
    (Dense(3), 5, "9183e28566c9"),
    (Fixed(3), 10, "ccdb9c73b512"),
    (Fixed(3, attention="unidirectional"), 10, "ead48b61b21f"),
    (
        Fixed(
            3,
            num_local_blocks=6,
            num_global_blocks=2,
            different_layout_per_head=True,
            num_different_global_patterns=3,
        ),
        11,
        "4d0d5387c3b8",
    ),
    (
        Fixed(3, num_local_blocks=6, num_global_blocks=3, attention="unidirectional"),
        13,
        "1717b384686b",
    ),
    (
        Fixed(
            3, num_local_blocks=4, num_global_blocks=2, horizontal_global_attention=True
        ),
        9,
        "90b85235c769",
    ),
    (Variable(3), 12, "c81092bcc1c9"),
    (
        Variable(
            3,
            local_window_blocks=[1, 2, 4],
            global_block_indices=[3, 20],
            attention="unidirectional",
        ),
        15,
        "8454023124f3",
    ),
    (
        Variable(
            3,
            local_window_blocks=[5, 2],
            global_block_indices=[3, 12],
            global_block_end_indices=[5, 20],
            horizontal_global_attention=True,
        ),
        15,
        "4df7a6225af5",
    ),
    (BSLongformer(3), 12, "c0046eef30b7"),
    (
        BSLongformer(
            3,
            num_sliding_window_blocks=4,
            global_block_indices=[2, 9],
            global_block_end_indices=[4, 10],
            attention="unidirectional",
        ),
        14,
        "93dbf626e168",
    ),
    (BigBird(3, num_random_blocks=0), 12, "c0046eef30b7"),
    (
        BigBird(
            3,
            num_random_blocks=0,
            num_sliding_window_blocks=5,
            num_global_blocks=2,
            attention="unidirectional",
        ),
        12,
        "c001ac7b0229",
    ),
    (LocalSlidingWindow(3), 12, "582c7a246054"),
    (
        LocalSlidingWindow(3, num_sliding_window_blocks=6, attention="bidirectional"),
        12,
        "7bd6cd41726c",
    ),
]
"""Digests of what DeepSpeed 0.16.9 builds, without blocks above the diagonal where
attention is unidirectional."""


@pytest.mark.parametrize(("config", "num_blocks", "digest"), GOLDEN)
def test_layouts_are_those_of_deepspeed(config, num_blocks, digest):
    bits = np.packbits(dense_of(config, num_blocks)).tobytes()
    assert hashlib.sha256(bits).hexdigest()[:12] == digest


@each_attention
@pytest.mark.parametrize("count", [0, 1, 3, 12])
def test_random_blocks_are_as_many_as_asked_and_in_reach(count, attention):
    visible = Dense(1, attention=attention).visible(12)
    pattern = layouts.random_pattern(visible, count, np.random.default_rng(0))
    live = np.zeros((12, 12), bool)
    live[pattern.rows, pattern.columns] = True
    np.testing.assert_array_equal(live.sum(axis=1), np.minimum(count, visible))
    assert (pattern.columns < visible[pattern.rows]).all()


def test_every_draw_is_as_likely():
    num_rows = 20_000
    visible = np.full(num_rows, 5)
    pattern = layouts.random_pattern(visible, 2, np.random.default_rng(0))
    pairs = pattern.columns.reshape(num_rows, 2)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(counts) == 10
    deviation = np.sqrt(num_rows * 0.1 * 0.9)
    assert np.abs(counts - num_rows / 10).max() < 4 * deviation


@each_attention
@each_random_class
def test_random_blocks_come_on_top(rule, attention):
    config = rule(2, num_random_blocks=3, attention=attention)
    live = dense_of(config, 20)
    base = dense_of(dataclasses.replace(config, num_random_blocks=0), 20)
    drawn = live & ~base
    assert not (base & ~live).any()
    assert drawn.any()
    assert drawn.sum(axis=-1).max() <= 3


@each_random_class
def test_draws_differ_by_head_and_seed_alone(rule):
    def layout(**given):
        return rule(4, num_random_blocks=2, **given).layout(16 * 24)

    shared = layout()
    assert shared.head_patterns == (0, 0, 0, 0)
    assert layout(different_layout_per_head=True).head_patterns == (0, 1, 2, 3)
    np.random.seed(1)
    np.testing.assert_array_equal(shared.to_dense(), layout().to_dense())
    assert (shared.to_dense() != layout(seed=1).to_dense()).any()
    own = layout(different_layout_per_head=True).to_dense()
    np.testing.assert_array_equal(own[0], shared.to_dense()[0])


@each_class
def test_no_block_and_no_token_sees_the_future_unless_asked(rule):
    layout = rule(3, attention="unidirectional").layout(16 * 13)
    assert layout.causal
    assert not np.triu(layout.to_dense(), 1).any()
    assert layout.to_dense().diagonal(axis1=1, axis2=2).all()
    layout = rule(3, attention="unidirectional", token_causal=False).layout(16 * 13)
    assert not layout.causal
    assert not np.triu(layout.to_dense(), 1).any()
    layout = rule(3, attention="bidirectional").layout(16 * 13)
    assert not layout.causal
    assert np.triu(layout.to_dense(), 1).any()


@each_class
def test_rules_are_values_whose_heads_share_one_pattern(rule):
    assert rule(3) == rule(3)
    assert hash(rule(3)) == hash(rule(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule(3).block = 32
    layout = rule(3, block=32).layout(32 * 13)
    assert (layout.block, layout.num_rows, layout.num_columns) == (32, 13, 13)
    assert (layout.head_patterns, len(layout.patterns)) == ((0, 0, 0), 1)


@pytest.mark.parametrize(
    "config",
    [
        BigBird(4, different_layout_per_head=True, num_random_blocks=2),
        BSLongformer(4),
        LocalSlidingWindow(4),
        Variable(4, num_random_blocks=1),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_million_tokens_need_no_square_array(config):
    tracemalloc.start()
    try:
        layout = config.layout(MILLION)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layout.num_rows == MILLION // 16
    assert peak < layout.num_rows**2 / 50


LIVE = np.random.default_rng(0).random((2, 4, 4)) < 0.5


@pytest.mark.parametrize(
    "live", [LIVE, LIVE.astype(int), LIVE.tolist()], ids=["bool", "0-and-1", "list"]
)
def test_its_layout_is_the_array(live):
    np.testing.assert_array_equal(Custom(2, live=live).layout(64).to_dense(), LIVE)


def test_arrays_serve_several_heads_shorter_sequences_and_one_direction():
    layout = Custom(3, 32, live=LIVE[0]).layout(128)
    np.testing.assert_array_equal(layout.to_dense(), [LIVE[0]] * 3)
    assert len(layout.patterns) == 1
    shorter = Custom(2, live=LIVE).layout(32).to_dense()
    np.testing.assert_array_equal(shorter, LIVE[:, :2, :2])
    layout = Custom(2, live=LIVE, attention="unidirectional").layout(64)
    np.testing.assert_array_equal(layout.to_dense(), LIVE & np.tri(4, dtype=bool))
    assert layout.causal


def test_what_a_rule_holds_makes_it_equal():
    """Fails if one array could be given the layout of another, or of a later one."""
    live = LIVE.copy()
    rule = Custom(2, live=live)
    assert rule == Custom(2, live=LIVE.astype(int))
    assert hash(rule) == hash(dataclasses.replace(rule))
    assert rule != Custom(2, live=~LIVE)
    live[:] = True
    np.testing.assert_array_equal(rule.layout(64).to_dense(), LIVE)


def test_longer_than_the_array_is_refused():
    with value_error(
        "num_blocks=5 is more than the 4 of live; give a larger array, or up to 64 "
        "tokens, as by max_seq_length=64"
    ):
        Custom(2, live=LIVE).layout(80)
