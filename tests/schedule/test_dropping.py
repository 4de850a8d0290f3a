"""Kept tokens and layers by step, and what is refused of them in exact words."""

import pytest

from zjax.parallel.slots import assign_slots, whole_slots
from zjax.schedule.dropping import num_middle_layers
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema


def make_schedule(length, kept, lengths=None, *, num_layers=24, **settings):
    """The schedule of kept tokens, and of lengths that are cut, in one pacing each."""
    warmup = None
    if lengths:
        warmup = schema.Truncate(pacing=schema.LinearPacing(**lengths))
    config = schema.Config(
        global_batch_size=1,
        model=schema.Model(num_layers=num_layers),
        data=schema.Data(length=length),
        random_ltd=schema.Layerwise(pacing=schema.LinearPacing(**kept)),
        sequence_warmup=warmup,
        **settings,
    )
    return TrainingSchedule(config)


def test_kept_tokens_have_the_golden_values():
    """Linear from 128 to 2048 in multiples of 16, counted from 0."""
    kept = {"start": 128, "num_steps": 200_000, "multiple": 16}
    schedule = make_schedule(2048, kept, num_steps=286_102)
    golden = {
        0: 128,
        1_666: 128,
        1_667: 144,
        100_000: 1088,
        199_999: 2032,
        200_000: 2048,
    }
    assert {t: schedule.at(t + 1).num_kept for t in golden} == golden
    tokens = schedule.values(286_102)["consumed_layer_tokens"] / (286_102 * 2048)
    assert round(tokens / 24, 3) == 0.697


def test_theta_has_the_golden_values():
    drop = schema.LayerDrop(theta=0.5, gamma=0.001)
    schedule = TrainingSchedule(schema.Config(layer_drop=drop))
    golden = {0: 1.0, 1_000: 0.683940, 5_000: 0.503369, 10_000: 0.500023}
    found = {t: schedule.at(t + 1).theta for t in golden}
    assert {t: round(theta or 0, 6) for t, theta in found.items()} == golden
    assert schema.LayerDrop().rate(2_000) == 0.05


def test_sums_are_those_of_the_steps_when_lengths_grow_too():
    """In any order of steps; three layers, of which the middle one drops tokens."""
    kept_pacing = {"start": 4, "num_steps": 9, "multiple": 4}
    length_pacing = {"start": 8, "num_steps": 6, "multiple": 8}
    schedule = make_schedule(32, kept_pacing, length_pacing, num_layers=3, num_steps=12)
    kept = [min(4 + 28 * t // 9 // 4 * 4, 32) for t in range(12)]
    lengths = [min(8 + 24 * n // 6 // 8 * 8, 32) for n in range(1, 13)]
    wanted = [*map(min, kept, lengths)]
    assert [schedule.at(n).num_kept for n in range(1, 13)] == wanted
    for n in (*range(1, 13), 3):
        in_layers = 2 * sum(lengths[:n]) + sum(wanted[:n])
        assert schedule.values(n)["consumed_layer_tokens"] == in_layers
    pairs = [*zip(wanted, lengths, strict=True)]
    changes = [n + 1 for n in range(1, 12) if pairs[n] != pairs[n - 1]]
    found = [*schedule.changes(1)]
    assert [steps.start for steps in found] == changes
    assert [steps.stop for steps in found] == [*changes[1:], 13]


def test_changes_after_a_step_are_those_of_buckets_that_are_new():
    """Lengths come back, and longer ones change with the tokens that layers keep."""
    config = schema.Config(
        num_steps=9,
        global_batch_size=1,
        data=schema.Data(length=32),
        buckets=schema.Cut(shortest=8),
        random_ltd=schema.Span(
            pacing=schema.DiscretePacing(values=(8, 16, 32), last_steps=(3, 20))
        ),
    )
    lengths = [8, 16, 8, 16, 16, 8, 32, 16, 32]
    schedule = TrainingSchedule(
        config, shape_at=lambda step: (32 // lengths[step - 1], lengths[step - 1])
    )
    found = [*schedule.changes(1)]
    # From step 5 on, layers keep 16 tokens: rows of 16 and 32 are new.
    assert [steps.start for steps in found] == [2, 5, 7]
    assert {steps.stop for steps in found} == {10}


def test_first_and_last_block_are_whole():
    dense = schema.Model(num_layers=6)
    mixed = schema.Model(num_layers=6, moe=schema.TokenChoice(num_experts=4, every=2))
    assert num_middle_layers(schema.Config(model=dense), 1) == 4
    assert num_middle_layers(schema.Config(model=mixed), 1) == 2


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks"),
    [(6, 2, 1), (7, 2, 1), (5, 2, 1), (12, 2, 2), (8, 4, 1), (9, 4, 1), (12, 1, 1)],
)
def test_layers_that_count_are_those_that_stages_cut(num_layers, stages, chunks):
    """Fails if the counted layers are not those whose slots run on some tokens."""
    (slots,) = assign_slots([num_layers], stages * chunks, [1])
    places = [divmod(block, slots.size)[1] for block in range(num_layers)]
    wanted = sum((0, place) not in whole_slots([slots]) for place in places)
    pipeline = schema.Interleaved(num_chunks=chunks) if chunks > 1 else schema.Gpipe()
    config = schema.Config(
        model=schema.Model(num_layers=num_layers),
        mesh=schema.Mesh(pipeline=stages),
        pipeline=pipeline,
    )
    assert num_middle_layers(config, 8) == wanted
