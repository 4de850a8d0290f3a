"""Errors that name the setting at fault and the remedy; missing optional packages."""

import dataclasses
import errno
import importlib.metadata
import importlib.util
import os
import re
import signal
import stat

_MAX_SHOWN = 1_000
"""Maximum number of characters of a value in a message."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, in the form of every zjax error.

    Args:
        field: Setting, array path or file at fault, as the user would type it.
        value: Value of the setting, array or file.
        problem: Reason why the value cannot work, with the number it conflicts with.
        remedy: Imperative that names a value or an action that works.

    Example:
        >>> print(Problem("mesh.tensor", 3, "does not divide 16", "use 1, 2 or 4"))
        mesh.tensor=3 does not divide 16; use 1, 2 or 4
    """

    field: str
    value: object
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={self._shown()} {self.problem}; {self.remedy}"

    def _shown(self) -> str:
        """Formats the value, shortened in the middle."""
        try:
            text = repr(self.value)
        except (RecursionError, ValueError):  # nested too deep, or too many digits
            return f"<{type(self.value).__name__}>"
        # Both ends of a long value help; all of it would hide the problem.
        half = _MAX_SHOWN // 2
        return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


class ZjaxError(ValueError):
    """Base of all errors of zjax; carries one or more problems, one line each.

    Example:
        >>> str(ZjaxError(Problem("seed", -1, "is negative", "use 0 or more")))
        'seed=-1 is negative; use 0 or more'
    """

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self):  # else pickle would pass the text as a `Problem`
        return type(self), self.problems


class ConfigError(ZjaxError):
    """Settings that cannot work, alone or together."""


class PlanError(ZjaxError):
    """An array or optimizer that cannot be placed on the mesh."""


class ModelError(ZjaxError):
    """A model or loss that breaks its contract."""


class StateError(ZjaxError):
    """A state that a step has consumed."""


class DataError(ZjaxError):
    """Training data that is missing or malformed."""


class CheckpointError(ZjaxError):
    """A checkpoint that cannot be written, found or read."""


class StorageError(ZjaxError):
    """A disk that cannot hold the state of a run, or that returns other data."""


class OutputError(ZjaxError):
    """A file of a run that cannot be written."""


class BenchError(ZjaxError):
    """A measurement or comparison whose numbers would mean nothing."""


class NonFiniteError(ZjaxError):
    """A loss or gradient that is NaN or infinite, if the policy is to stop."""


class PackageError(ZjaxError):
    """A required package that is not installed."""


class ProcessError(ZjaxError):
    """Processes or devices that cannot start together, or a process that died."""


NEEDED_FOR = {
    "gguf": "GGUF files",
    "grain": "batches of a loader",
    "jinja2": "chat templates",
    "lm_eval": "tasks of the evaluation harness",
    "matplotlib": "pictures",
    "orbax": "checkpoints",
    "prometheus_client": "servers of texts",
    "pyarrow": "Parquet and Arrow files",
    "qwix": "matrices of int8 and int4",
    "safetensors": "safetensors files",
    "starlette": "servers of texts",
    "tensorboardX": "event files of TensorBoard",
    "tokenizers": "vocabularies of byte pairs",
    "uvicorn": "servers of texts",
}
"""Feature that needs each optional package, by import name."""
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Names to install, where the import name differs."""
OLDEST = {"jinja2": "3.1.6"}
"""Oldest versions that are safe: templates break out of the sandboxes of older
versions."""


def check_installed(name: str) -> None:
    """Refuses a package of `NEEDED_FOR` that is missing or older than `OLDEST`."""
    install = _DISTRIBUTIONS.get(name, name)
    if importlib.util.find_spec(name) is None:
        problem = f"is not installed, and {NEEDED_FOR[name]} need it"
        raise PackageError(Problem("package", name, problem, f"pip install {install}"))
    if name in OLDEST:
        found = importlib.metadata.version(install)
        if _release(found) < _release(OLDEST[name]):
            problem = f"is {found}, and {NEEDED_FOR[name]} need {OLDEST[name]} or later"
            remedy = f"pip install '{install}>={OLDEST[name]}'"
            raise PackageError(Problem("package", name, problem, remedy))


def _release(version: str) -> list[int]:
    """Parses the numbers of a version, without the mark of a pre-release.

    Example:
        >>> _release("3.1.6rc1")
        [3, 1, 6]
    """
    return [int(number) for number in re.findall(r"(?:^|\.)([0-9]+)", version)]


_RIGHTS, _LIMIT = "give this user access to it", "raise the limit of open files"
CHOOSE_DIRECTORY = "name a writable directory"
PROCESS_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EMFILE: _LIMIT,
    errno.ENFILE: _LIMIT,
}
"""Remedies by errno where the file may be intact, and this process cannot open it."""
_PATH_REMEDIES = {
    errno.EROFS: "make the file system writable",
    errno.ENOTDIR: "move the file that is in its way",
    errno.EEXIST: "move the file that is in its way",
    errno.EISDIR: "move the directory that is in its way",
    errno.ENOTEMPTY: "move the directory that is in its way",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "fix the links in its path",
}
"""Remedies by errno where the path is at fault."""
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.ENOENT, *_PATH_REMEDIES}
"""Errors that another path may avoid."""
_IN_TEXT = re.compile(r"OS error (\d+)")
"""The errno in a message of TensorStore."""


def find_remedy(
    error: BaseException,
    *,
    elsewhere: str = "",
    default: str = "free disk space or repair the file system",
) -> str:
    """Finds the remedy for a file that cannot be written, in the imperative.

    `elsewhere` is the remedy if another path would help and the user may choose a path;
    `default` if the disk is full or broken, or the cause is unknown.
    """
    number = find_errno(error)
    if elsewhere and number in _ELSEWHERE:
        return elsewhere
    return (PROCESS_REMEDIES | _PATH_REMEDIES).get(number, default)


def find_errno(error: BaseException) -> int:
    """Finds the errno of an error, or of the error that caused it; 0 without errno."""
    while error.__cause__ is not None:  # the innermost error is from the system
        error = error.__cause__
    if isinstance(error, OSError):
        return error.errno or 0
    match = _IN_TEXT.search(str(error))
    return int(match[1]) if match else 0


def find_fault(path: str | os.PathLike[str]) -> str:
    """Describes why a path is not a readable regular file.

    Returns:
        Text to follow the path; empty for a regular file, or a link to one.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "" if stat.S_ISREG(mode) else "is not a regular file"


def describe_exit(code: int) -> str:
    """Describes how a process ended; a negative `code` is a signal, as in `subprocess`.

    Example:
        >>> describe_exit(-9)
        'signal 9, SIGKILL, possibly out of memory'
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = ", possibly out of memory" if name == "SIGKILL" else ""
    return f"signal {-code}, {name}{hint}"
