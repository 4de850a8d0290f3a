"""Memory of this host, and how much of it JAX may pin."""

import math
import os
import pathlib
import socket
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

_GROUPS = pathlib.Path("/sys/fs/cgroup")
_PROCESS_GROUPS = pathlib.Path("/proc/self/cgroup")
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Variable with the GiB that JAX may pin."""
_ZJAX_LIMIT = "ZJAX_PINNED_LIMIT_GB"
"""Variable with the same number if zjax has set it, here or in the parent process."""
RESERVED_SHARE = 0.12
"""Share of host memory that is never pinned, unless the bytes below are fewer."""
RESERVED_BYTES, PINNED_OVERHEAD = 12 * 2**30, 0.05
"""Bytes reserved per process, and the share that pinning costs in driver and kernel:
226 GiB cost 11 GiB beside an H200, and the process took 5 GiB."""
POOL_OVERHEAD = 1.05
"""Size of the pinned memory pool over the bytes of its arrays, because of gaps."""
_PINNED_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Huge page policy of shared memory, which pinned GPU memory is."""
_LARGE_PAGES = ("[always]", "[within_size]", "[force]")
_SLOW_BYTES = 8 * 2**30
"""Takes about four seconds to pin in pages of 4 KiB."""


def host_memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *_limits()])


def _limits() -> Iterator[int]:
    """Memory limits of this process's control groups, versions 1 and 2."""
    groups = {(_GROUPS, "memory.max", pathlib.PurePath("/"))}
    lines = _PROCESS_GROUPS.read_text().splitlines() if _PROCESS_GROUPS.exists() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        own = pathlib.PurePath(path)
        for group in (own, *own.parents):
            if number == "0":
                groups.add((_GROUPS, "memory.max", group))
            elif "memory" in controllers.split(","):
                groups.add((_GROUPS / "memory", "memory.limit_in_bytes", group))
    for root, name, group in groups:
        file = root / str(group).lstrip("/") / name
        limit = file.read_text().strip() if file.exists() else "max"
        if limit != "max":
            yield int(limit)


def pinnable_bytes(
    host_bytes: int, num_processes: int = 1, unpinned_bytes: int = 0
) -> int:
    """Bytes that pinned arrays may take of a host's memory.

    Example:
        >>> [pinnable_bytes(size * 2**30) >> 30 for size in (100, 256, 1024)]
        [88, 231, 960]
    """
    fixed = RESERVED_BYTES * num_processes + PINNED_OVERHEAD * host_bytes
    reserved = min(RESERVED_SHARE * host_bytes, fixed)
    free, limit = max(0, host_bytes - int(reserved) - unpinned_bytes), _given_limit()
    if limit is None:
        return free
    return min(free, num_processes * int(float(limit) * 2**30))


def _given_limit() -> str | None:
    """The limit per process in GiB that was set outside of zjax."""
    limit = os.environ.get(_PINNED_LIMIT)
    return None if not limit or limit == os.environ.get(_ZJAX_LIMIT) else limit


def warn_of_small_pages(num_bytes: int, platform: str) -> None:
    """Warns if many bytes are pinned for GPUs in pages of 4 KiB, which is slow."""
    if platform != "gpu" or num_bytes < _SLOW_BYTES or not _PINNED_PAGES.exists():
        return
    if not set(_LARGE_PAGES) & set(_PINNED_PAGES.read_text().split()):
        how = f"as root: echo always > {_PINNED_PAGES}"
        logging.warning("huge pages would make placing the state faster; %s", how)


class LocalProcesses(NamedTuple):
    """The processes of this host, this one included."""

    num_devices: int
    num_processes: int


def local_processes(num_local: int) -> LocalProcesses:
    """Counts the processes of this host and their devices."""
    if jax.process_count() == 1:
        return LocalProcesses(num_local, 1)
    name = zlib.crc32(socket.gethostname().encode())
    hosts = multihost_utils.process_allgather(np.array([name, num_local], np.uint32))
    counts = [count for host, count in hosts.tolist() if host == name]
    return LocalProcesses(int(sum(counts)), len(counts))


def limit_pinned_memory(
    num_bytes: float = math.inf, unpinned_bytes: int = 0, num_processes: int = 1
) -> None:
    """Sets how much JAX may pin; JAX reads it once, when it starts its devices.

    A limit set outside of zjax takes precedence.
    """
    if _given_limit() is None:
        earlier = os.environ.get(_ZJAX_LIMIT)
        unpinned = num_processes * unpinned_bytes
        host = pinnable_bytes(host_memory_bytes(), num_processes, unpinned)
        most = max(1, host // num_processes >> 30)
        limit = str(math.ceil(min(num_bytes / 2**30, most, int(earlier or most))))
        os.environ.update({_PINNED_LIMIT: limit, _ZJAX_LIMIT: limit})


limit_pinned_memory()  # JAX's default is 64 GB
