import pytest

from zjax.sharding import plan as plans


@pytest.fixture(autouse=True)
def _small_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
