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
    assert run_through([*[NAN] * 19, FINE, *[NAN] * 19], num_skipped=5).in_a_row == 19


def test_the_number_of_steps_in_a_row_is_a_setting():
    assert run_through([NAN] * 2, max_skipped_in_a_row=3).in_a_row == 2
    assert "skipped 3 steps in a row" in told(*[NAN] * 3, max_skipped_in_a_row=3)
    assert run_through([NAN] * 29, max_skipped_in_a_row=30).in_a_row == 29


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


def count_rounds(rounds, **precision):
    """Counts rounds of three local steps, of which the last step is shared."""
    precision = load_config({}, precision=precision).precision
    skipped, step, total = SkippedSteps(precision, num_steps=99, num_skipped=0), 0, 0
    for values, num_skipped in rounds:
        for each in values:
            step += 1
            is_shared = step % 3 == 0
            total += num_skipped * is_shared
            numbers = each | {"skipped_steps": float(total)}
            skipped.count(step, numbers, is_shared=is_shared)
            if is_shared:
                skipped.check(step, numbers)
    return skipped


def test_local_steps_that_a_replica_skips_count_in_a_row():
    """Fails if local steps, whose number is not shared yet, begin the count anew."""
    broken = [NAN, NAN, NAN], 3
    assert count_rounds([broken] * 6).in_a_row == 18
    with pytest.raises(NonFiniteError) as error:
        count_rounds([([FINE] * 3, 0), *[broken] * 7])
    assert "skipped 21 steps in a row, starting with loss=nan at step 4" in str(
        error.value
    )
    assert count_rounds([*[broken] * 6, ([FINE, NAN, FINE], 1)]).in_a_row == 0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            [FINE, OVERFLOW, FINE],
            "grad_norm=inf is not finite at step 5, whose update was not applied; ",
        ),
        (
            [FINE] * 3,
            "skipped_steps=1.0 at one of steps 4 to 6: a replica took no step; ",
        ),
    ],
    ids=["this-process", "another-process"],
)
def test_stop_names_the_local_step(values, text):
    """Fails if the step that ends the round is named."""
    with pytest.raises(NonFiniteError) as error:
        count_rounds([([FINE] * 3, 0), (values, 1)], on_nonfinite="stop")
    assert str(error.value).startswith(text)


def test_batches_without_a_trained_token_are_told():
    """Fails if the learning rate is blamed for masks."""
    empty = {"loss": 0.0, "grad_norm": 0.0, "weight": 0.0}
    masks = "look at masks and weights of the data, or at sequence_warmup"
    assert told(FINE | {"weight": 9.0}, *[empty] * 20) == (
        "precision.on_nonfinite='skip' skipped 20 steps in a row, starting with "
        f"weight=0.0 at step 2; {masks}; earlier checkpoints are unaffected"
    )
    assert told(empty, on_nonfinite="stop") == (
        f"weight=0.0 at step 1: the batch has nothing to train on; {masks}"
    )


def test_a_gradient_that_an_update_lost_ends_the_run():
    """A sum of squares may overflow, and a NaN is no sum of finite gradients."""
    run_through([FINE, OVERFLOW, FINE], on_nonfinite="update")
    assert told(FINE | {"grad_norm": math.nan}, on_nonfinite="update").startswith(
        "grad_norm=nan is not finite at step 1, whose update was applied; go back"
    )
