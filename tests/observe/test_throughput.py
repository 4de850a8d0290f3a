"""Speed from a clock that the test turns."""

import pytest

from zjax.observe import Throughput


class Clock:
    """Seconds that only `pass_time` moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def make(peak=1e12, num_devices=2):
    clock = Clock()
    return clock, Throughput(num_devices, peak, (1e9, 2e9), clock=clock)


def run_laps(clock, speed, *seconds, **settings):
    for lap in seconds:
        clock.pass_time(lap)
        speed.lap(100, **settings)


def test_the_first_two_laps_do_not_count():
    clock, speed = make()
    run_laps(clock, speed, 60.0, 7.0)
    assert speed.read() == {}
    run_laps(clock, speed, 0.5, 1.5)
    assert speed.read()["step_seconds"] == 1.0


def test_speed_is_over_all_devices_and_mfu_over_their_peak():
    clock, speed = make(peak=1e12, num_devices=2)
    run_laps(clock, speed, 1.0, 1.0, 0.5, 0.5)
    assert speed.read() == {
        "step_seconds": 0.5,
        "tokens_per_second": 200.0,
        "mfu": pytest.approx(200 * 1e9 / 2e12),
        "mfu_full_attention": pytest.approx(200 * 2e9 / 2e12),
    }


def test_no_mfu_without_a_peak():
    clock, speed = make(peak=None)
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    assert set(speed.read()) == {"step_seconds", "tokens_per_second"}


def test_each_reading_is_of_its_own_window():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 4.0)
    speed.read()
    run_laps(clock, speed, 2.0, 2.0)
    assert speed.read()["step_seconds"] == 2.0
    assert speed.read() == {}


def test_a_lap_that_compiled_does_not_count():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    run_laps(clock, speed, 30.0, compiled=True)
    run_laps(clock, speed, 0.5)
    assert speed.read()["step_seconds"] == 0.5


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_excluded_work_does_not_count(fails):
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0)
    clock.pass_time(0.25)
    try:
        with speed.excluded():
            clock.pass_time(90.0)
            if fails:
                raise OSError
    except OSError:
        assert fails
    run_laps(clock, speed, 0.25)
    assert speed.read()["step_seconds"] == 0.5


def test_tokens_of_steps_may_differ():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0)
    for num_tokens in (100, 300):
        clock.pass_time(1.0)
        speed.lap(num_tokens)
    assert speed.read()["tokens_per_second"] == 200.0
