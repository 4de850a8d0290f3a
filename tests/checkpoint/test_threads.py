"""Threads that the end of the process does not wait for."""

import threading

import pytest

from zjax.checkpoint.sums import Task, map_in_threads


def test_a_thread_and_those_that_it_starts_end_with_the_process():
    """Fails if one of Orbax that hangs keeps a process from its end."""

    def kinds():
        return threading.current_thread().daemon, threading.Thread().daemon

    assert Task("any", kinds).result() == (True, True)
    assert map_in_threads(lambda _: kinds(), range(3), 2) == 3 * [(True, True)]


def test_the_result_comes_once_the_thread_has_ended():
    """Fails if what the thread holds is taken down while the process ends."""
    go_on = threading.Event()
    task = Task("any", go_on.wait)
    assert not task.done()
    go_on.set()
    assert task.result() is True
    assert task.done()


def test_errors_are_raised():
    def act(number):
        if number == 2:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        map_in_threads(act, range(9), 3)
