"""Figures as they are saved."""

import pytest
from matplotlib.figure import Figure


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
