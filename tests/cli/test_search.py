"""Which settings are tried next, by predictions that are made up."""

import dataclasses

from zjax.cli.tune_search import OUT_OF_MEMORY, Outcome, fastest, next_candidate
from zjax.estimate.candidates import Candidate

SIZES = (1, 2, 4, 8, 16)
REMATS = ("none", "elementwise", "full")
BYTES = {"none": 4, "elementwise": 2, "full": 1}
SECONDS = {"none": 1.0, "elementwise": 1.01, "full": 1.3}


class Predictions:
    """State takes 10 bytes, and a row of a microbatch as many as its policy saves."""

    usable_bytes = 45

    def __init__(self, obstacles=()):
        self.obstacles = obstacles

    def obstacle(self, candidate):
        return "cannot work" if candidate in self.obstacles else ""

    def num_bytes(self, candidate):
        return 10 + candidate.microbatch_size * BYTES[candidate.remat]

    def seconds(self, candidate):
        return SECONDS[candidate.remat] * (1 + 0.1 / candidate.microbatch_size)


RANKED = sorted(
    (Candidate(size, 1, remat) for size in SIZES for remat in REMATS),
    key=Predictions().seconds,
)
GIVEN = Candidate(2, 1, "full")


def done(candidate, speed=None, peak=1.0, failure=""):
    size = Predictions().num_bytes(candidate)
    if failure:
        return Outcome(candidate, size, failure=failure)
    speed = speed or 1 / Predictions().seconds(candidate)
    return Outcome(candidate, size, speed, peak * size)


def pick(*outcomes, given=GIVEN, predictions=None):
    return next_candidate(RANKED, given, outcomes, predictions or Predictions())


def test_the_given_settings_come_first_then_the_best_by_prediction_that_fits():
    assert pick() == GIVEN
    best = pick(done(GIVEN))
    assert best == Candidate(8, 1, "none")
    assert Predictions().num_bytes(best) <= 45
    assert pick(given=None) == best
    assert pick(given=Candidate(16, 1, "none")) == best  # as given does not fit


def test_what_cannot_work_is_not_tried():
    best = Candidate(8, 1, "none")
    assert pick(done(GIVEN), predictions=Predictions([best])) == Candidate(
        16, 1, "elementwise"
    )


def test_after_running_out_of_memory_less_is_tried():
    failed = done(Candidate(8, 1, "none"), failure=OUT_OF_MEMORY)
    found = pick(done(GIVEN), failed)
    assert Predictions().num_bytes(found) < failed.predicted_bytes
    assert found == Candidate(8, 1, "elementwise")  # one of 16 takes as much
    other = dataclasses.replace(failed, failure="exit code 2")
    assert pick(done(GIVEN), other) == Candidate(16, 1, "elementwise")


def test_a_measured_peak_below_its_prediction_lets_more_fit():
    whole = Candidate(16, 1, "none")  # 74 bytes, of which 45 fit
    assert pick(done(GIVEN, peak=0.71)) != whole
    roomy = Predictions()
    roomy.usable_bytes = 60
    assert pick(done(GIVEN), predictions=roomy) == Candidate(8, 1, "none")
    assert pick(done(GIVEN, peak=0.8), predictions=roomy) == whole
    # Peaks far below are of other parts of the program.
    assert pick(done(GIVEN, peak=0.1)) != whole


def test_a_measured_peak_above_its_prediction_lets_less_fit():
    given = done(GIVEN, peak=1.2)
    assert pick(given) == Candidate(8, 1, "elementwise")


def test_then_neighbours_of_the_fastest_are_tried_until_none_promises_more():
    best = done(Candidate(8, 1, "none"), speed=9.0)
    first = pick(done(GIVEN), best)
    assert first == Candidate(8, 1, "elementwise")
    second = pick(done(GIVEN), best, done(first, speed=8.0))
    assert second == Candidate(4, 1, "none")
    third = pick(done(GIVEN), best, done(first, speed=8.0), done(second, speed=7.0))
    assert third is None  # full is predicted to take 30 % more
    faster = pick(done(GIVEN), best, done(first, speed=10.0))
    assert faster == Candidate(16, 1, "elementwise")


def test_the_fastest_is_the_one_that_ran():
    failed = done(Candidate(8, 1, "none"), failure=OUT_OF_MEMORY)
    assert fastest([failed]) is None
    slow, fast = done(GIVEN, speed=1.0), done(Candidate(4, 1, "none"), speed=2.0)
    assert fastest([failed, fast, slow]) is fast
