"""Bytes and speed of the memory of devices."""

import jax
import pytest

from tests.support.refusals import config_error
from zjax.estimate import device_memory
from zjax.estimate.device_memory import known_memory, measure_bandwidth, named_memory


@pytest.mark.parametrize(
    ("kind", "gigabytes", "terabytes_per_second"),
    [
        ("NVIDIA H200", 141, 4.8),
        ("NVIDIA H100 80GB HBM3", 80, 3.35),
        ("NVIDIA H100 PCIe", 80, 2.0),
        ("NVIDIA A100-SXM4-80GB", 80, 2.039),
        ("NVIDIA A100 80GB PCIe", 80, 1.935),
        ("NVIDIA A100-SXM4-40GB", 40, 1.555),
        ("NVIDIA L4", 24, 0.3),
        ("Tesla T4", 16, 0.32),
    ],
)
def test_memory_is_that_of_the_data_sheet(kind, gigabytes, terabytes_per_second):
    found = known_memory(kind)
    assert found == (gigabytes * 1e9, terabytes_per_second * 1e12)
    assert named_memory(kind.removeprefix("NVIDIA ")) == found


def test_a_device_of_an_unknown_memory_is_refused():
    assert known_memory("cpu") is None
    names = ", ".join(device_memory._MEMORIES)
    with config_error(
        f"device='H2000' has a memory that zjax does not know; use one of {names}"
    ):
        named_memory("H2000")


def test_a_copy_reads_and_writes_the_memory(monkeypatch):
    """Fails if bytes are counted once, or the first call, which compiles, counts."""
    monkeypatch.setattr(device_memory, "_COPIED_FLOATS", 2**20)
    times = iter([0.0, 4.0, 4.0, 6.0, *[6.0, 9.0] * 3])
    monkeypatch.setattr(device_memory.time, "perf_counter", lambda: next(times))
    assert measure_bandwidth() == 2 * 4 * 2**20 / 2
    assert jax.devices()[0].platform == "cpu"
