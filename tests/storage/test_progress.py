"""Placing a large state shows how far it is."""

import io

from rich.console import Console

from tests.support.offload import make_config, start
from zjax.sharding import memory
from zjax.sharding import plan as plans
from zjax.storage import transfers


def bar_of(monkeypatch, long_bytes, *, is_terminal=True):
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(transfers, "Console", lambda stderr: console)
    monkeypatch.setattr(transfers, "_LONG_BYTES", long_bytes)
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    run = start(make_config("pinned_host"))
    return text.getvalue(), 8 * memory.stored_bytes(run.plan).host


def test_all_bytes_are_told(monkeypatch):
    """Fails if the bar stops before its end, or goes beyond it."""
    text, total = bar_of(monkeypatch, 1)
    assert "placing the state" in text
    size = f"{total / 1000:.1f}/{total / 1000:.1f} kB"
    assert size in text.rpartition("placing the state")[2]


def test_short_moves_show_nothing(monkeypatch):
    assert bar_of(monkeypatch, 10**9)[0] == ""


def test_a_log_has_a_line_now_and_then(monkeypatch):
    """Fails if a job is silent while its state is placed, or a bar fills its log."""
    assert bar_of(monkeypatch, 1, is_terminal=False)[0] == ""
    monkeypatch.setattr(transfers, "_LINE_SECONDS", 0)
    text, total = bar_of(monkeypatch, 1, is_terminal=False)
    said = f"{total / 1e9:.1f} of {total / 1e9:.1f} GB"
    assert text.splitlines()[-1] == f"placing the state: {said}"
