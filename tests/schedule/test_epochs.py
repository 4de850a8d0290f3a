"""Lengths of runs in epochs: steps of them, and where nobody counts the rows."""

import jax
import pytest

import zjax
from zjax.cli.bench import measure
from zjax.config import check_config, gin, load_config
from zjax.errors import ConfigError
from zjax.run.plan_report import report_plan
from zjax.schedule.lengths import steps_of
from zjax.settings import convert, describe, schema

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
    with pytest.raises(ConfigError) as error:
        use(load_config({"num_epochs": 2}))
    assert str(error.value) == UNCOUNTED


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
        (
            {"num_epochs": -1},
            "num_epochs=-1.0 is out of range; use 0 or more",
        ),
    ],
    ids=["steps", "range"],
)
def test_steps_that_are_set_and_epochs_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config({"num_epochs": 2} | settings), 1)
    assert str(error.value) == message


def test_steps_that_nobody_set_stay_so():
    """Fails if a file made from the defaults, or a printed one, sets the steps."""
    changed = convert.base()
    changed.num_epochs = 2
    printed = describe.describe_config(load_config({"num_epochs": 2}))
    for config in (
        load_config(changed),
        load_config(load_config(changed), "seed=1"),
        gin.from_gin(bindings=printed.splitlines()),
    ):
        with pytest.raises(ConfigError) as error:
            check_config(config, 1)
        assert str(error.value) == UNCOUNTED
    assert "config.num_steps = 1000\n" in describe.describe_config(schema.Config())


def test_steps_of_a_config_that_comes_with_zjax_give_way_to_epochs(caplog):
    config = load_config("quickstart", "num_epochs=2")
    with pytest.raises(ConfigError) as error:
        check_config(config, 1)
    assert str(error.value) == UNCOUNTED
    assert "num_steps=400 of quickstart gives way" in caplog.text
