"""Cases of which some run by hand alone."""

from collections.abc import Collection, Hashable, Iterable

import pytest


def some_by_hand(names: Iterable[Hashable], by_hand: Collection[Hashable]):
    """Parameters of a test: those by hand are slow, and others hold what they hold."""
    unknown = set(by_hand) - set(names)
    assert not unknown, unknown
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in by_hand))
        for name in names
    ]
