"""What files take of a disk."""

import contextlib
import os

from zjax.estimate.tables import num_microbatches
from zjax.sharding import memory


def block_bytes(*paths):
    """Blocks of directories and of all within, as the file system counts them."""
    found = 0
    for path in paths:
        there = (os.path.join(a, n) for a, b, c in os.walk(path) for n in b + c)
        for each in (path, *there):
            with contextlib.suppress(FileNotFoundError):  # it goes at this moment
                found += 512 * os.stat(each).st_blocks
    return found


def rows_on_disk(run):
    """Plans of the arrays that a run stores on disks."""
    number = num_microbatches(run.plan, run.config)
    return memory.rows_on_disk(run.plan, run.config.zero, number)
