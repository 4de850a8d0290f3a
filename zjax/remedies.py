"""The way out of what the system says of a file, by its number of the error."""

import errno
import os
import re
import stat

_RIGHTS, _LIMIT = "give this user access to it", "raise the limit of open files"
MADE = "name a directory that can be made and written to"
OF_THE_PROCESS = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EMFILE: _LIMIT,
    errno.ENFILE: _LIMIT,
}
"""The file may be sound: this process may not, or cannot, open it."""
_OF_THE_PATH = {
    errno.EROFS: "make the file system writable",
    errno.ENOTDIR: "move the file that is in its way",
    errno.EEXIST: "move the file that is in its way",
    errno.EISDIR: "move the directory that is in its way",
    errno.ENOTEMPTY: "move the directory that is in its way",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "mend the links in its path",
}
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.ENOENT, *_OF_THE_PATH}
"""What another path would not say."""
_IN_TEXT = re.compile(r"OS error (\d+)")
"""How TensorStore passes it on."""


def find_remedy(
    error: BaseException,
    *,
    elsewhere: str = "",
    default: str = "make room or mend the file system",
) -> str:
    """What to do about a file that cannot be written.

    Args:
        error: What the file system said, or an error that was raised from it.
        elsewhere: The remedy where another path would do, if the user may choose one.
        default: The remedy where the disk is full or broken, or nobody knows.

    Returns:
        It, in the imperative.

    Example:
        >>> find_remedy(IsADirectoryError(errno.EISDIR, "Is a directory"))
        'move the directory that is in its way'
        >>> find_remedy(OSError(errno.ENOSPC, "No space left on device"))
        'make room or mend the file system'
    """
    number = find_errno(error)
    if elsewhere and number in _ELSEWHERE:
        return elsewhere
    return (OF_THE_PROCESS | _OF_THE_PATH).get(number, default)


def find_errno(error: BaseException) -> int:
    """The number that the system gave an error.

    Args:
        error: What was raised, maybe from the error of the system.

    Returns:
        It, or 0 where there is none.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError):
        return error.errno or 0
    found = _IN_TEXT.search(str(error))
    return int(found[1]) if found else 0


def find_fault(path: str | os.PathLike[str]) -> str:
    """Why a path is no file that can be read.

    Args:
        path: Where it should be.

    Returns:
        What to say after its name; empty for a regular file, or a link to one.

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
