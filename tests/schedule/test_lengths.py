"""Lengths of sequences by step, and lengths of runs in epochs and tokens."""

import jax
import pytest

import zjax
from tests.support.refusals import config_error
from zjax.config import check_config, gin, load_config
from zjax.run.bench import measure
from zjax.run.plan_report import report_plan
from zjax.schedule.lengths import end_by_tokens, steps_of
from zjax.schedule.training import TrainingSchedule
from zjax.settings import describe, mappings, schema


def test_without_warm_up_all_sequences_are_whole():
    schedule = TrainingSchedule(schema.Config(data=schema.Data(length=96)))
    assert schedule.shapes == ((32, 96),) and not list(schedule.changes(1))
    assert schedule.tokens.sum_until(5) == 32 * 480


TOKENS = 200_000
"""Reached in step 7 of 32 x 1,024 tokens."""


@pytest.mark.parametrize("kind", [None, schema.Window, schema.Truncate, schema.Reshape])
def test_tokens_end_a_pacing_at_the_step_that_reaches_them(kind):
    """Of kept tokens and of lengths, on which the tokens depend; fails for steps."""
    pacing = schema.LinearPacing(num_tokens=TOKENS)
    config = schema.Config(
        sequence_warmup=kind(pacing=pacing) if kind else None,
        random_ltd=schema.Span(pacing=pacing),
    )
    schedule = TrainingSchedule(config)
    tokens, length = schedule.tokens, config.data.length
    steps = range(1, config.num_steps + 1)
    # Kept tokens count earlier steps: the step after the end is the first whole one.
    whole = next(n for n in steps if schedule.at(n, length).num_kept == length)
    end = whole - 1
    assert tokens.sum_until(end - 1) < TOKENS <= tokens.sum_until(end)
    assert (end == 7) == (kind in (None, schema.Window))
    if kind:
        grown = [schedule.at(n).window or schedule.at(n).length for n in steps]
        assert grown.index(length) + 1 == end


def test_windows_leave_sequences_whole():
    """Counted from step 1, as the paper counts lengths (golden A.4)."""
    pacing = schema.LinearPacing(start=8, multiple=8, num_steps=15_000)
    warmup = schema.Window(pacing=pacing)
    config = schema.Config(sequence_warmup=warmup)
    schedule = TrainingSchedule(config)
    assert {schedule.at(n).length for n in (1, 500, 15_000)} == {1024}
    found = [schedule.at(n).window for n in (1, 119, 500, 7_500, 14_999, 15_000)]
    assert found == [8, 16, 40, 512, 1016, 1024]


@pytest.mark.parametrize(
    ("warmup", "last"),
    [(None, 4), (schema.Truncate(pacing=schema.LinearPacing(num_steps=15)), 9)],
    ids=["none", "truncate"],
)
def test_tokens_end_a_run_at_the_step_that_consumes_them(warmup, last):
    """4 steps of 32 x 1,024 tokens; lengths of 64, 128, ... take 9 steps to as many."""
    for num_tokens, end in ((98_305, last), (98_304, last - (warmup is None))):
        config = schema.Config(num_tokens=num_tokens, sequence_warmup=warmup)
        assert end_by_tokens(config).num_steps == end


UNCOUNTED = (
    "num_epochs=2.0 needs the number of rows, which only zjax.Trainer counts; "
    "set num_steps"
)


@pytest.mark.parametrize(
    ("num_epochs", "num_rows", "global_batch_size", "expected"),
    [
        (2.0, 1_024, 16, 128),
        (2.0, 10, 8, 3),  # 2.5 steps, not 2 for each epoch
        (1.0, 3, 8, 1),
        (0.5, 1_025, 16, 33),
        (1e-9, 10, 8, 1),
        (1.1, 1_000, 100, 11),  # 12 for the float, which is above 1.1
        (1.0, 2**60 + 1, 1, 2**60 + 1),
    ],
)
def test_steps_draw_each_row_once_per_epoch(
    num_epochs, num_rows, global_batch_size, expected
):
    assert steps_of(num_epochs, num_rows, global_batch_size) == expected


@pytest.mark.parametrize(
    "use",
    [
        lambda config: check_config(config, 1),
        lambda config: zjax.initialize(
            None, None, None, {}, config=config, devices=jax.devices()[:1]
        ),
        lambda config: report_plan(config, num_devices=8),
        lambda config: measure(config, devices=jax.devices()[:1]),
    ],
    ids=["check", "initialize", "plan", "bench"],
)
def test_epochs_are_refused_where_nobody_counts_the_rows(use):
    with config_error(UNCOUNTED):
        use(load_config({"num_epochs": 2}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # the default, once it is set, counts as set
        (
            {"num_steps": 1_000},
            f"{UNCOUNTED}\n"
            "num_steps=1000 has no effect with num_epochs=2.0; leave it out, or set "
            "num_epochs=0",
        ),
        ({"num_epochs": -1}, "num_epochs=-1.0 is out of range; use 0 or more"),
    ],
    ids=["steps", "range"],
)
def test_steps_that_are_set_and_epochs_out_of_range_are_refused(settings, message):
    with config_error(message):
        check_config(load_config({"num_epochs": 2} | settings), 1)


def test_steps_that_nobody_set_stay_so():
    """Fails if a file made from the defaults, or a printed one, sets the steps."""
    changed = mappings.base()
    changed.num_epochs = 2
    printed = describe.describe_config(load_config({"num_epochs": 2}))
    for config in (
        load_config(changed),
        load_config(load_config(changed), "seed=1"),
        gin.from_gin(bindings=printed.splitlines()),
    ):
        with config_error(UNCOUNTED):
            check_config(config, 1)
    assert "config.num_steps = 1000\n" in describe.describe_config(schema.Config())


def test_steps_of_a_config_that_comes_with_zjax_give_way_to_epochs(caplog):
    config = load_config("quickstart", "num_epochs=2")
    with config_error(UNCOUNTED):
        check_config(config, 1)
    assert "num_steps=400 of quickstart gives way" in caplog.text
