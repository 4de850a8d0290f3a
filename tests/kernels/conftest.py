"""A Hopper GPU that is said to be there, and an empty cache of tunings."""

import pytest

from zjax_kernels import device
from zjax_kernels.grouped import tuning as grouped
from zjax_kernels.sparse import tuning as sparse


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of a cache that nobody has written to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for measured in (grouped.MEASURED, sparse.MEASURED):
        monkeypatch.setattr(measured, "_read", None)
    return tmp_path
