"""Remedies for file system errors, by errno, and words for the ends of processes."""

import errno
import os
import re
import signal
import stat

_RIGHTS, _LIMIT = "give this user access to it", "raise the limit of open files"
CHOOSE_DIRECTORY = "name a writable directory"
PROCESS_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EMFILE: _LIMIT,
    errno.ENFILE: _LIMIT,
}
"""The file may be intact; this process cannot open it."""
_PATH_REMEDIES = {
    errno.EROFS: "make the file system writable",
    errno.ENOTDIR: "move the file that is in its way",
    errno.EEXIST: "move the file that is in its way",
    errno.EISDIR: "move the directory that is in its way",
    errno.ENOTEMPTY: "move the directory that is in its way",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "fix the links in its path",
}
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
    """What to do about a file that cannot be written, in the imperative.

    Args:
        error: Error of the file system, or one raised from it.
        elsewhere: Remedy if another path would help and the user may choose one.
        default: Remedy if the disk is full or broken, or the cause is unknown.

    Example:
        >>> find_remedy(IsADirectoryError(errno.EISDIR, "Is a directory"))
        'move the directory that is in its way'
        >>> find_remedy(OSError(errno.ENOSPC, "No space left on device"))
        'free disk space or repair the file system'
    """
    number = find_errno(error)
    if elsewhere and number in _ELSEWHERE:
        return elsewhere
    return (PROCESS_REMEDIES | _PATH_REMEDIES).get(number, default)


def find_errno(error: BaseException) -> int:
    """The errno of an error, or of the error it was raised from; 0 if there is none."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError):
        return error.errno or 0
    match = _IN_TEXT.search(str(error))
    return int(match[1]) if match else 0


def find_fault(path: str | os.PathLike[str]) -> str:
    """Why a path is not a readable regular file.

    Returns:
        Text to follow the path; empty for a regular file, or a link to one.

    Example:
        >>> find_fault("/dev/null"), find_fault("/"), find_fault("/nowhere/a")
        ('is not a regular file', 'is a directory', 'does not exist')
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
    """Describes how a process ended, by its exit code.

    Args:
        code: As `subprocess` gives it: negative for a signal.

    Example:
        >>> describe_exit(-9)
        'signal 9, SIGKILL, possibly out of memory'
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = ", possibly out of memory" if name == "SIGKILL" else ""
    return f"signal {-code}, {name}{hint}"
