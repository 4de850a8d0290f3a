"""The memory of this machine, and how much of it JAX may pin."""

import math
import os
import pathlib

_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""What JAX may pin, in GiB."""
_OUR_LIMIT = "ZJAX_PINNED_LIMIT_GB"
"""The same, where zjax has set it: here, or in the process that started this one."""
HOST_SHARE = 0.9
"""Of a host's memory, that arrays may take."""
PINNED_SPARE = 1.05
"""What the pool of pinned memory takes, of the bytes of its arrays: for gaps."""


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where it is limited.

    Returns:
        Bytes.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _LIMIT.read_text().strip() if _LIMIT.exists() else "max"
    return memory if limit == "max" else min(memory, int(limit))


def limit_pinned_memory(num_bytes: int) -> None:
    """Lowers how much JAX may pin; it reads this once, when it starts its devices.

    What is set outside of zjax has the last word.

    Args:
        num_bytes: No more than the host's share is taken of it.
    """
    ours = os.environ.get(_OUR_LIMIT)
    if os.environ.get(_PINNED_LIMIT, ours) == ours:
        most = int(ours or HOST_SHARE * host_memory_bytes() / 2**30)
        limit = str(min(math.ceil(num_bytes / 2**30), most))
        os.environ.update({_PINNED_LIMIT: limit, _OUR_LIMIT: limit})


limit_pinned_memory(host_memory_bytes())  # JAX would stop at 64 GB
