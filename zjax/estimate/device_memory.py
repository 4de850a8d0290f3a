"""Memory of devices: bytes and bytes per second, from data sheets or by a copy."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import ConfigError, Problem
from zjax.models.flops import find_kind

_COPIED_FLOATS = 2**26
_NUM_COPIES = 5


class DeviceMemory(NamedTuple):
    """Memory of a device."""

    num_bytes: float
    bytes_per_second: float


_MEMORIES: dict[str, tuple[float, float]] = {
    "H200": (141, 4.8),
    "GH200": (96, 4.0),
    "H100 PCIe": (80, 2.0),
    "H100 NVL": (94, 3.9),
    "H100": (80, 3.35),
    "H20": (96, 4.0),
    "B200": (180, 8.0),
    "GB200": (186, 8.0),
    "A100 SXM4 80GB": (80, 2.039),
    "A100 80GB PCIe": (80, 1.935),
    "A100": (40, 1.555),
    "A800 SXM4 80GB": (80, 2.039),
    "A800 80GB PCIe": (80, 1.935),
    "A40": (48, 0.696),
    "A30": (24, 0.933),
    "A10": (24, 0.6),
    "A10G": (24, 0.6),
    "RTX A6000": (48, 0.768),
    "L40S": (48, 0.864),
    "L40": (48, 0.864),
    "L4": (24, 0.3),
    "RTX 3090": (24, 0.936),
    "RTX 4090": (24, 1.008),
    "RTX 5090": (32, 1.792),
    "V100": (16, 0.9),
    "T4": (16, 0.32),
}
"""GB, and TB/s, from data sheets; the smaller memory where a name has two. First match
wins."""


def known_memory(device_kind: str) -> DeviceMemory | None:
    """Returns the memory by `jax.Device.device_kind`; None for a device like a CPU.

    Example:
        >>> known_memory("NVIDIA H200")
        DeviceMemory(num_bytes=141000000000.0, bytes_per_second=4800000000000.0)
    """
    name = find_kind(device_kind, _MEMORIES)
    if not name:
        return None
    gigabytes, terabytes_per_second = _MEMORIES[name]
    return DeviceMemory(gigabytes * 1e9, terabytes_per_second * 1e12)


def named_memory(device: str) -> DeviceMemory:
    """Returns the memory of the device that a user names.

    Raises:
        ConfigError: The name is unknown.
    """
    found = known_memory(device)
    if found is None:
        remedy = f"use one of {', '.join(_MEMORIES)}"
        problem = "has a memory that zjax does not know"
        raise ConfigError(Problem("device", device, problem, remedy))
    return found


def measure_bandwidth() -> float:
    """Measures the bytes per second at which a device reads and writes its memory."""
    numbers = jnp.ones(_COPIED_FLOATS, jnp.float32)
    copy = jax.jit(jnp.negative)
    jax.block_until_ready(copy(numbers))
    seconds = []
    for _ in range(_NUM_COPIES):
        start = time.perf_counter()
        jax.block_until_ready(copy(numbers))
        seconds.append(time.perf_counter() - start)
    return 2 * numbers.nbytes / min(seconds)
