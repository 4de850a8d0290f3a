"""The directory of a run: usable before it starts, and clear words when it fills up."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from zjax.errors import ConfigError, OutputError, Problem
from zjax.remedies import MADE, find_remedy


def check_directory(directory: str) -> None:
    """Makes the directory of a run, and finds out whether files can be made in it.

    Args:
        directory: The path; what is missing above it is made as well.

    Raises:
        ConfigError: If it is not a directory, or nothing can be made in it.
    """
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
        remedy = find_remedy(error, elsewhere=MADE)
        raise ConfigError(Problem("directory", directory, problem, remedy)) from error


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Says in the terms of a run that a file of it cannot be written.

    Args:
        path: The file, in the run's directory.

    Raises:
        OutputError: In place of an OSError of the enclosed work.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({path.name}: {error.strerror or error})"
        remedy = f"{find_remedy(error)}, and run again"
        raise OutputError(
            Problem("directory", str(path.parent), problem, remedy)
        ) from error
