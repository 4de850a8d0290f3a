"""What replicas exchange by step: golden tables of every method, and the programs."""

import collections

import pytest

from tests.reference.zero_one_adam import schedule
from zjax.config import load_config
from zjax.schedule.exchange import (
    Exchanges,
    Intervals,
    Phase,
    Rounds,
    StepExchange,
    make_exchanges,
    zero_one_phases,
)
from zjax.schedule.training import TrainingSchedule


def exchanges_of(*overrides):
    return make_exchanges(load_config({"num_steps": 40}, *overrides))


def warm_up(codec):
    return Phase("warm_up", "gradients", codec), Phase("compressed", "steps", "onebit")


def synchronous(codec):
    return Phase("synchronous", "gradients", codec), Phase("local", "nothing")


def names_of(exchanges, num_steps):
    return [exchanges.at(step).phase.name for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), Exchanges()),
        (
            ["communication.codec=int8"],
            Exchanges(phases=(Phase("train", "gradients", "int8"),)),
        ),
        (
            ["optimizer.rule=onebit_lamb"],
            Exchanges(phases=warm_up("bfloat16"), freeze_step=6),
        ),
        (
            ["optimizer.rule=onebit_adam", "communication.codec=float8"],
            Exchanges(phases=warm_up("float8"), freeze_step=6),
        ),
        (
            ["optimizer.rule=zero_one_adam", "precision.reduce_dtype=float32"],
            Intervals(
                phases=zero_one_phases("float32"),
                freeze_step=6,
                num_steps=40,
                var_update_scaler=16,
                local_step_scaler=6,
                local_step_clipper=16,
            ),
        ),
        (
            ["communication.local_steps.num_steps=5", "communication.codec=int4"],
            Rounds(outer_codec="int4", num_local_steps=5),
        ),
        (
            [
                "communication.local_steps.num_steps=5",
                "communication.local_steps.num_fragments=2",
                "communication.local_steps.delay=1",
                "communication.local_steps.num_synchronous_steps=3",
            ],
            Rounds(
                phases=synchronous("bfloat16"),
                num_local_steps=5,
                num_fragments=2,
                delay=1,
                num_synchronous_steps=3,
            ),
        ),
    ],
)
def test_settings_make_the_table_of_their_method(overrides, found):
    assert exchanges_of(*overrides) == found


def test_a_plain_run_has_one_program_that_no_codec_touches():
    exchanges = exchanges_of()
    assert exchanges.sending == ()
    assert not exchanges.steps_apart
    assert exchanges.count_programs(40) == {"train": 40}


def test_a_codec_is_the_program_of_every_step():
    exchanges = exchanges_of("communication.codec=int8")
    assert [phase.codec for phase in exchanges.sending] == ["int8"]
    assert exchanges.count_programs(40) == {"train": 40}


def test_a_warm_up_ends_with_the_freeze():
    exchanges = Exchanges(phases=warm_up("float32"), freeze_step=3)
    assert names_of(exchanges, 5) == ["warm_up"] * 3 + ["compressed"] * 2
    messages = [(x.message, x.codec) for x in exchanges.sending]
    assert messages == [("gradients", "float32"), ("steps", "onebit")]
    assert exchanges.at(4).shares_metrics


def test_fragments_of_a_round_end_at_equal_distances():
    rounds = Rounds(num_local_steps=6, num_fragments=3, num_synchronous_steps=1)
    merged = {step: rounds.at(step).merged for step in range(1, 14)}
    ends = {3: 0, 5: 1, 7: 2, 9: 0, 11: 1, 13: 2}
    assert {step: part for step, part in merged.items() if part is not None} == ends


def test_a_round_after_synchronous_steps_has_the_golden_programs():
    rounds = Rounds(
        phases=synchronous("bfloat16"),
        num_local_steps=4,
        num_fragments=2,
        delay=2,
        num_synchronous_steps=1,
    )
    assert [rounds.at(step).programs for step in range(1, 6)] == [
        ("synchronous", "outer_gradients_0", "mean_0"),
        ("train",),
        ("train", "outer_gradients_1", "mean_1", "merge_0"),
        ("train",),
        ("train", "outer_gradients_0", "mean_0", "merge_1", "end_of_round"),
    ]
    shared = [rounds.at(step).shares_metrics for step in range(1, 6)]
    assert shared == [True, False, False, False, True]
    assert [phase.name for phase in rounds.sending] == ["synchronous"]
    assert rounds.batch_programs(range(1, 4)) == ["synchronous", "train"]


def test_rounds_alone_send_nothing_in_a_step():
    assert Rounds(num_local_steps=4).sending == ()
    assert Rounds(num_local_steps=4).batch_programs(range(1, 9)) == ["train"]


def intervals_of(num_steps, freeze_step, kappa, scaler, clipper):
    return Intervals(
        phases=zero_one_phases("float32"),
        num_steps=num_steps,
        freeze_step=freeze_step,
        var_update_scaler=kappa,
        local_step_scaler=scaler,
        local_step_clipper=clipper,
    )


def test_a_hundred_steps_have_the_golden_schedule():
    """`var_freeze_step` 40 of the reference freezes after step 41."""
    found = names_of(intervals_of(100, 41, 4, 10, 4), 100)
    assert found == schedule(100, 4, 40, 10, 4)
    full = [step for step, name in enumerate(found, start=1) if name == "variance"]
    assert full == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40]
    counts = collections.Counter(found)
    assert counts["one_bit"] + counts["merged"] == 52
    assert counts["local"] == 34


@pytest.mark.parametrize("clipper", [1, 6, 16])
@pytest.mark.parametrize("kappa", [1, 3, 16])
def test_schedules_are_those_of_the_counters(kappa, clipper):
    expected = schedule(3000, kappa, 499, 37, clipper)
    found = names_of(intervals_of(3000, 500, kappa, 37, clipper), 3000)
    assert found[:-1] == expected[:-1]
    assert found[-1] == "merged"


def test_merged_steps_exchange_all_parameters_and_the_freeze_resets_errors():
    exchanges = intervals_of(20, 3, 1, 2, 4)
    kinds = {exchanges.at(step)[1:] for step in range(1, 21)}
    assert kinds == {
        (None, None, False, False),
        (None, None, False, True),
        (0, 0, True, False),
    }
    assert [s for s in range(1, 21) if exchanges.at(s).resets_errors] == [3]
    merges = [s for s in range(1, 21) if exchanges.at(s).ends_round]
    assert merges == [4, 5, 6, 8, 12, 16, 20]
    assert [phase.name for phase in exchanges.sending] == ["variance", "one_bit"]


def test_steps_of_the_training_schedule_say_their_exchange():
    config = load_config({"num_steps": 40}, "optimizer.rule=zero_one_adam")
    found, exchanges = TrainingSchedule(config).at(40).exchange, make_exchanges(config)
    assert found == exchanges.at(40)
    assert isinstance(found, StepExchange)
    assert found.programs == (
        "train",
        "outer_gradients_0",
        "mean_0",
        "merge_0",
        "end_of_round",
    )
