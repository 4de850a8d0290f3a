"""Rollouts draw from all tokens: their passes compile neither filters nor penalties."""

import pytest

from tests.support import asked


@pytest.fixture(scope="module", autouse=True)
def _unfiltered():
    with asked.compiling(asked.DRAWS):
        yield
