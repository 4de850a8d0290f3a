"""Only what Orbax prints of failures is kept from the screen."""

import logging

import pytest

from zjax.checkpoint.steps import hide_orbax_errors

ORBAX = ValueError("cannot write 2.orbax-checkpoint-tmp")
READ = ValueError("OUT_OF_RANGE: Error opening [tensorstore_spec='{}']")
OTHER = ValueError("a mistake of someone else")


@pytest.mark.parametrize(
    ("name", "level", "error", "shown"),
    [
        pytest.param("absl", logging.ERROR, ORBAX, False, id="failed-save"),
        pytest.param("absl", logging.ERROR, OTHER, True, id="other-failure"),
        pytest.param("absl", logging.WARNING, None, True, id="warning"),
        pytest.param("asyncio", logging.ERROR, ORBAX, False, id="task-of-orbax"),
        pytest.param("asyncio", logging.ERROR, READ, False, id="read-for-orbax"),
        pytest.param("asyncio", logging.ERROR, OTHER, True, id="other-task"),
        pytest.param("zjax", logging.ERROR, ORBAX, True, id="other-logger"),
    ],
)
def test_others_are_heard(name, level, error, shown, caplog):
    hide_orbax_errors()
    text = "orbax is slow" if error is None else "it failed"
    info = None if error is None else (type(error), error, None)
    logger = logging.getLogger(name)
    logger.handle(logging.LogRecord(name, level, "file.py", 1, text, (), info))
    assert [record.message for record in caplog.records] == [text] * shown
