"""Steps that are skipped end a run where no later one would be applied."""

import math

import pytest

from zjax.config import load_config
from zjax.errors import NonFiniteError
from zjax.observe.skipped import SkippedSteps

NAN = {"loss": math.nan, "grad_norm": math.nan}
OVERFLOW = {"loss": 2.0, "grad_norm": math.inf}
FINE = {"loss": 2.0, "grad_norm": 1.0}
SCALED = {"loss_scale": 2.0**16, "loss_scale_spent": 0.0}
SEARCHES = OVERFLOW | SCALED


def run_through(steps, *, num_steps=1_000, num_skipped=0, **precision):
    """Counts and checks steps; gives the number of the last, and the watcher."""
    settings = load_config({}, precision=precision).precision
    skipped = SkippedSteps(settings, num_steps=num_steps, num_skipped=num_skipped)
    for step, values in enumerate(steps, start=1):
        was_applied = values["grad_norm"] == 1.0 or precision == {
            "on_nonfinite": "update"
        }
        num_skipped += not was_applied
        values = values | {"skipped_steps": float(num_skipped)}
        assert skipped.count(step, values) == (not was_applied)
        skipped.check(step, values)
    return skipped


def told(*steps, **settings):
    with pytest.raises(NonFiniteError) as error:
        run_through(steps, **settings)
    return str(error.value)


def test_twenty_steps_in_a_row_without_an_update_end_the_run():
    assert run_through([FINE, *[NAN] * 19]).in_a_row == 19
    assert told(FINE, FINE, OVERFLOW, *[NAN] * 19) == (
        "precision.on_nonfinite='skip' skipped 20 steps in a row, starting with "
        "grad_norm=inf at step 3; lower optimizer.peak_learning_rate or look at the "
        "data; earlier checkpoints are unaffected"
    )


def test_the_number_of_steps_in_a_row_is_a_setting():
    assert run_through([NAN] * 2, max_skipped_in_a_row=3).in_a_row == 2
    assert "skipped 3 steps in a row" in told(*[NAN] * 3, max_skipped_in_a_row=3)
    assert run_through([NAN] * 29, max_skipped_in_a_row=30).in_a_row == 29


def test_a_step_that_is_applied_begins_the_count_anew():
    assert run_through([*[NAN] * 19, FINE, *[NAN] * 19], num_skipped=5).in_a_row == 19


def test_a_run_of_which_every_step_was_skipped_is_not_done():
    assert told(NAN, NAN, NAN, num_steps=3) == (
        "precision.on_nonfinite='skip' skipped all 3 steps, starting with loss=nan "
        "at step 1; lower optimizer.peak_learning_rate or look at the data; earlier "
        "checkpoints are unaffected"
    )
    run_through([FINE, NAN, NAN], num_steps=3)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_the_search_for_a_loss_scale_is_no_fault(policy):
    """Fails if it is counted: 2**40 takes more than 20 steps to fall."""
    settings = {"compute_dtype": "float16", "on_nonfinite": policy}
    assert run_through([SEARCHES] * 41, num_steps=41, **settings).in_a_row == 0


def test_a_fixed_loss_scale_is_not_searched():
    settings = {"compute_dtype": "float16", "loss_scale": {"window": 0}}
    assert "20 steps in a row" in told(*[SEARCHES] * 20, **settings)


def test_no_loss_scale_helps_a_loss_that_is_not_finite():
    bad = NAN | SCALED
    assert "starting with loss=nan at step 3" in told(
        SEARCHES, SEARCHES, *[bad] * 20, compute_dtype="float16"
    )
    assert told(bad | {"loss_scale_spent": 1.0}, compute_dtype="float16") == (
        "precision.loss_scale.minimum=1.0 is the minimum and step 1 still overflows, "
        "whose loss is nan; lower optimizer.peak_learning_rate or look at the data"
    )


def test_weights_that_an_update_lost_end_the_run_at_once():
    assert told(FINE, NAN, on_nonfinite="update") == (
        "loss=nan is not finite at step 2, whose update was applied; go back to the "
        "last checkpoint, and lower optimizer.peak_learning_rate or look at the data"
    )
