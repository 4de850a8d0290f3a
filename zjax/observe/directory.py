"""The run's directory: a check before the run starts, and errors when a write fails."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from zjax.errors import ConfigError, OutputError, Problem
from zjax.files import make_directory
from zjax.remedies import CHOOSE_DIRECTORY, find_remedy


def check_directory(directory: str) -> None:
    """Creates the run's directory and checks that files can be created in it.

    Args:
        directory: Path; missing parents are created.

    Raises:
        ConfigError: It is not a directory, or not writable.
    """
    try:
        make_directory(pathlib.Path(directory))
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
        remedy = find_remedy(error, elsewhere=CHOOSE_DIRECTORY)
        raise ConfigError(Problem("directory", directory, problem, remedy)) from error


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Raises an OSError of the enclosed work as an `OutputError`.

    Args:
        path: The file written, in the run's directory.

    Raises:
        OutputError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({path.name}: {error.strerror or error})"
        remedy = f"{find_remedy(error)}, and run again"
        raise OutputError(
            Problem("directory", str(path.parent), problem, remedy)
        ) from error
