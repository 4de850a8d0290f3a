"""Figures as they are saved, and passes that compile what a test asks for."""

import pytest
from matplotlib.figure import Figure

from tests.support import asked


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, beside their files."""
    figures = []
    save = Figure.savefig

    def keep(figure, *args, **settings):
        figures.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.fixture
def greedy():
    """Passes compile the choice of the most likely token alone."""
    with asked.compiling(asked.BEST):
        yield


@pytest.fixture
def unfiltered():
    """Passes compile draws and log-probabilities, and neither filters nor penalties."""
    with asked.compiling(asked.DRAWS):
        yield
