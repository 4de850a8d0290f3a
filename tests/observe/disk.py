"""A disk that is full, and the files that a test still holds open."""

import contextlib
import os
import pathlib
import resource


@contextlib.contextmanager
def full_disk(size):
    """Lets no file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_files(directory):
    """Paths under a directory that this process has open."""
    links = pathlib.Path("/proc/self/fd").iterdir()
    paths = [os.readlink(link) for link in links if link.is_symlink()]
    return [path for path in paths if path.startswith(f"{directory}/")]
