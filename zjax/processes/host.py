"""The memory of this machine, and how much of it JAX may pin."""

import os
import pathlib

_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""What JAX may pin."""


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where it is limited.

    Returns:
        Bytes.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _LIMIT.read_text().strip() if _LIMIT.exists() else "max"
    return memory if limit == "max" else min(memory, int(limit))


# JAX would stop at 64 GB, and reads this once, when it starts its devices.
os.environ.setdefault(_PINNED_LIMIT, str(host_memory_bytes() // 10**9))
