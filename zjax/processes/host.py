"""The memory of this machine, and how much of it JAX may pin."""

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
_OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""What JAX may pin, in GiB."""
_OUR_LIMIT = "ZJAX_PINNED_LIMIT_GB"
"""The same, where zjax has set it: here, or in the process that started this one."""
KEPT_SHARE = 0.12
"""Of a host's memory, what pinned arrays leave to others; less where it is much."""
KEPT_BYTES, PINNED_COST = 12 * 2**30, 0.05
"""For each process, and of the memory for what pages cost the driver and the kernel
where they are pinned: 226 GiB cost 11 GiB beside an H200, and the process took 5."""
PINNED_SPARE = 1.05
"""What the pool of pinned memory takes, of the bytes of its arrays: for gaps."""
_PINNED_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""What the kernel does for shared memory, which pinned memory of a GPU is."""
_LARGE_PAGES = ("[always]", "[within_size]", "[force]")
_SLOW_BYTES = 8 * 2**30
"""Takes some four seconds to pin in pages of 4 KiB."""


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where it is limited.

    Returns:
        Bytes.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *_limits()])


def _limits() -> Iterator[int]:
    """Those of the control groups that this process is in, of both versions."""
    groups = {(_GROUPS, "memory.max", pathlib.PurePath("/"))}
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
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
    host_bytes: int, num_processes: int = 1, beside_bytes: int = 0
) -> int:
    """What pinned arrays may take of a host's memory.

    Args:
        host_bytes: Memory of the host.
        num_processes: That share it.
        beside_bytes: For arrays that are not pinned.

    Returns:
        Bytes: all but 12 %, or less than that where it is much, and but for what
        lies beside; or less than both, where the environment lets JAX pin no more.

    Example:
        >>> [pinnable_bytes(size * 2**30) >> 30 for size in (100, 256, 1024)]
        [88, 231, 960]
    """
    others = KEPT_BYTES * num_processes + PINNED_COST * host_bytes
    kept = min(KEPT_SHARE * host_bytes, others)
    room, given = max(0, host_bytes - int(kept) - beside_bytes), _given_limit()
    if given is None:
        return room
    return min(room, num_processes * int(float(given) * 2**30))


def _given_limit() -> str | None:
    """What is set outside of zjax, in GiB for each process."""
    given = os.environ.get(_PINNED_LIMIT)
    return None if not given or given == os.environ.get(_OUR_LIMIT) else given


def tell_of_small_pages(num_bytes: int, platform: str) -> None:
    """Warns where much is to be pinned for GPUs in pages of 4 KiB, which is slow.

    Args:
        num_bytes: That this process pins.
        platform: Of its devices, as JAX names it.
    """
    if platform != "gpu" or num_bytes < _SLOW_BYTES or not _PINNED_PAGES.exists():
        return
    if not set(_LARGE_PAGES) & set(_PINNED_PAGES.read_text().split()):
        how = f"as root: echo always > {_PINNED_PAGES}"
        logging.warning("large pages would make placing the state faster; %s", how)


class Sharers(NamedTuple):
    """Who shares the memory of a host."""

    num_devices: int
    num_processes: int


def sharers_of_host(num_local: int) -> Sharers:
    """Who shares the memory of this host, other processes included.

    Args:
        num_local: Devices of this process.

    Returns:
        Their numbers; all processes must ask, as they tell each other.
    """
    if jax.process_count() == 1:
        return Sharers(num_local, 1)
    name = zlib.crc32(socket.gethostname().encode())
    hosts = multihost_utils.process_allgather(np.array([name, num_local], np.uint32))
    counts = [count for host, count in hosts.tolist() if host == name]
    return Sharers(int(sum(counts)), len(counts))


def limit_pinned_memory(
    num_bytes: float = math.inf, beside_bytes: int = 0, num_processes: int = 1
) -> None:
    """Lowers how much JAX may pin; it reads this once, when it starts its devices.

    What is set outside of zjax has the last word.

    Args:
        num_bytes: What is needed; the host has less for arrays where that is more.
        beside_bytes: Of this process, for arrays that are not pinned.
        num_processes: That share the host equally.
    """
    if _given_limit() is None:
        ours = os.environ.get(_OUR_LIMIT)
        beside = num_processes * beside_bytes
        host = pinnable_bytes(host_memory_bytes(), num_processes, beside)
        room = max(1, host // num_processes >> 30)
        limit = str(math.ceil(min(num_bytes / 2**30, room, int(ours or room))))
        os.environ.update({_PINNED_LIMIT: limit, _OUR_LIMIT: limit})


limit_pinned_memory()  # JAX would stop at 64 GB
