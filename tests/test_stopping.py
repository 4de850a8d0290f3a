"""A run that is told to stop does so between two steps, and says so by its status."""

import os
import signal

import pytest

from zjax.stopping import stop_signals


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_stops_with_the_conventional_status(number, status, capfd):
    before = signal.getsignal(number)
    with stop_signals() as stopped:
        assert not stopped(0)
        os.kill(os.getpid(), number)
        assert stopped(1)
    assert stopped.exit_status == status
    assert signal.getsignal(number) is before
    assert "stopping after this step; saving a checkpoint" in capfd.readouterr().out


def test_the_second_interrupt_ends_at_once():
    with stop_signals(), pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_may_be_asked_to_stop_without_a_signal():
    with stop_signals() as stopped:
        stopped.request()
        assert stopped(1)
