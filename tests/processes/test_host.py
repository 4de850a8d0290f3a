"""How much memory this process may use."""

import logging

import pytest

from zjax.processes import host


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        pytest.param("0::/", {}, 2**40, id="no limit"),
        pytest.param("0::/", {"memory.max": 700}, 700, id="of a container"),
        pytest.param(
            "0::/job/step",
            {"memory.max": 900, "job/memory.max": 500, "job/step/memory.max": "max"},
            500,
            id="of a group above",
        ),
        pytest.param(
            "4:cpu:/other\n3:memory:/job",
            {"memory/job/memory.limit_in_bytes": 300, "memory/other/x": 1},
            300,
            id="of the first version",
        ),
    ],
)
def test_the_least_limit_counts(monkeypatch, tmp_path, own, limits, expected):
    """Fails if a limit of a job is not seen, and arrays are killed in place of told."""
    for name, limit in limits.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "_PROCESS_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host.os, "sysconf", lambda name: 2**20)
    assert host.host_memory_bytes() == expected


TOLD = "huge pages would make placing the state faster; as root: echo always > {}"


@pytest.mark.parametrize(
    ("setting", "num_bytes", "platform", "told"),
    [
        ("always within_size advise [never] deny force", 8 * 2**30, "gpu", True),
        ("always within_size [advise] never deny force", 8 * 2**30, "gpu", True),
        ("[always] within_size advise never deny force", 8 * 2**30, "gpu", False),
        ("always [within_size] advise never deny force", 8 * 2**30, "gpu", False),
        ("always within_size advise never deny [force]", 8 * 2**30, "gpu", False),
        ("always within_size advise [never] deny force", 2**30, "gpu", False),
        ("always within_size advise [never] deny force", 8 * 2**30, "cpu", False),
        (None, 8 * 2**30, "gpu", False),
    ],
)
def test_small_pages_are_told(
    monkeypatch, tmp_path, caplog, setting, num_bytes, platform, told
):
    """Fails if a host is slow to pin and nobody says what to type, or told in vain."""
    file = tmp_path / "shmem_enabled"
    if setting is not None:
        file.write_text(f"{setting}\n")
    monkeypatch.setattr(host, "_PINNED_PAGES", file)
    with caplog.at_level(logging.WARNING, logger="absl"):
        host.warn_of_small_pages(num_bytes, platform)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([TOLD.format(file)] if told else [])
