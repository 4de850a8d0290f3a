"""Memory of this host, the share that JAX may pin, and the local processes."""

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
"""Variable with the limit that zjax has set, here or in a parent process: if equal to
the limit above, no user has set one."""
RESERVED_SHARE = 0.12
"""Share of host memory that is never pinned, unless the bytes below are fewer."""
RESERVED_BYTES, PINNING_COST = 12 * 2**30, 0.05
"""Bytes reserved per process, and the share that pinning costs in driver and kernel:
226 GiB cost 11 GiB beside an H200, and the process took 5 GiB."""
POOL_RATIO = 1.05
"""Size of the pinned memory pool over the bytes of its arrays, because of gaps."""
_SHARED_HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Huge page policy of shared memory, which pinned GPU memory is."""
_HUGE_PAGE_POLICIES = ("[always]", "[within_size]", "[force]")
_SLOW_BYTES = 8 * 2**30
"""Takes about four seconds to pin in pages of 4 KiB."""


def host_memory_bytes() -> int:
    """Bytes of memory that this process may use, of the machine or a cgroup limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *_limits()])


def _limits() -> Iterator[int]:
    """Yields the memory limits of the current control groups, versions 1 and 2."""
    # Inside a container, the limit is at the root, whatever path /proc names.
    groups = {(_GROUPS, "memory.max", pathlib.PurePath("/"))}
    lines = _PROCESS_GROUPS.read_text().splitlines() if _PROCESS_GROUPS.exists() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        own = pathlib.PurePath(path)
        for group in (own, *own.parents):
            # Hierarchy 0 is cgroup v2.
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
    """Bytes of host memory that the pinned arrays of all local processes may take.

    Without the reserved bytes (12 %, or less on a large host) and `unpinned_bytes`;
    less if the environment limits JAX.

    Example:
        >>> [pinnable_bytes(size * 2**30) >> 30 for size in (100, 256, 1024)]
        [88, 231, 960]
    """
    fixed = RESERVED_BYTES * num_processes + PINNING_COST * host_bytes
    reserved = min(RESERVED_SHARE * host_bytes, fixed)
    free, limit = max(0, host_bytes - int(reserved) - unpinned_bytes), _given_limit()
    if limit is None:
        return free
    return min(free, num_processes * int(float(limit) * 2**30))


def _given_limit() -> str | None:
    """Limit per process in GiB that was set outside of zjax, or None."""
    limit = os.environ.get(_PINNED_LIMIT)
    return None if not limit or limit == os.environ.get(_ZJAX_LIMIT) else limit


def warn_of_small_pages(num_bytes: int, platform: str) -> None:
    """Warns if many bytes are pinned for GPUs in pages of 4 KiB, which is slow."""
    if platform != "gpu" or num_bytes < _SLOW_BYTES or not _SHARED_HUGE_PAGES.exists():
        return
    if not set(_HUGE_PAGE_POLICIES) & set(_SHARED_HUGE_PAGES.read_text().split()):
        how = f"as root: echo always > {_SHARED_HUGE_PAGES}"
        logging.warning("huge pages would make placing the state faster; %s", how)


class LocalProcesses(NamedTuple):
    """Number of devices and processes of this host, this process included."""

    num_devices: int
    num_processes: int


def local_processes(num_local: int) -> LocalProcesses:
    """Counts the processes and devices of this host; a collective call.

    `num_local` is the number of devices of this process.
    """
    if jax.process_count() == 1:
        return LocalProcesses(num_local, 1)
    name = zlib.crc32(socket.gethostname().encode())  # all-gather takes numbers only
    hosts = multihost_utils.process_allgather(np.array([name, num_local], np.uint32))
    counts = [count for host, count in hosts.tolist() if host == name]
    return LocalProcesses(int(sum(counts)), len(counts))


def limit_pinned_memory(
    num_bytes: float = math.inf, unpinned_bytes: int = 0, num_processes: int = 1
) -> None:
    """Sets the GiB that JAX may pin, which JAX reads once, when the devices start.

    A limit set outside of zjax takes precedence. `num_bytes` and `unpinned_bytes` are
    per process.
    """
    if _given_limit() is None:
        earlier = os.environ.get(_ZJAX_LIMIT)
        unpinned = num_processes * unpinned_bytes
        host = pinnable_bytes(host_memory_bytes(), num_processes, unpinned)
        most = max(1, host // num_processes >> 30)
        # An earlier limit, of this process or of a parent, is only lowered.
        limit = str(math.ceil(min(num_bytes / 2**30, most, int(earlier or most))))
        os.environ.update({_PINNED_LIMIT: limit, _ZJAX_LIMIT: limit})


limit_pinned_memory()  # on import, before devices start: JAX's default is 64 GB
