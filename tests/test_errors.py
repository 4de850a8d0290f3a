"""Messages stay readable, and their remedy follows from what the system said."""

import errno
import os
import pickle

import pytest

from zjax.errors import DataError, Problem, find_errno, find_fault, find_remedy


def test_a_long_value_is_shown_at_both_ends():
    text = str(Problem("a", "x" * 10**6 + "y", "is long", "cut it"))
    assert text == f"a='{'x' * 499}...{'x' * 498}y' is long; cut it"


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    value = []
    for _ in range(10**5):
        value = [value]
    assert str(Problem("a", value, "is deep", "cut it")) == "a=<list> is deep; cut it"
    assert str(Problem("a", 10**5000, "is long", "cut it")).startswith("a=<int> is")


def test_an_error_of_another_process_keeps_its_problems():
    error = DataError(Problem("a", 1, "is odd", "use 2"), Problem("b", 3, "is", "use"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DataError
    assert (again.problems, str(again)) == (error.problems, str(error))


ROOM = "free disk space or repair the file system"


@pytest.mark.parametrize(
    ("number", "remedy", "is_elsewhere"),
    [
        (errno.ENOSPC, ROOM, False),
        (errno.EDQUOT, ROOM, False),
        (errno.EFBIG, ROOM, False),
        (errno.EIO, ROOM, False),
        (errno.EMFILE, "raise the limit of open files", False),
        (errno.EACCES, "give this user access to it", True),
        (errno.EPERM, "give this user access to it", True),
        (errno.EROFS, "make the file system writable", True),
        (errno.ENOENT, ROOM, True),
        (errno.ENOTDIR, "move the file that is in its way", True),
        (errno.EEXIST, "move the file that is in its way", True),
        (errno.EISDIR, "move the directory that is in its way", True),
        (errno.ENAMETOOLONG, "use a shorter path", True),
        (errno.ELOOP, "fix the links in its path", True),
    ],
)
def test_each_error_has_the_remedy_of_its_cause(number, remedy, is_elsewhere):
    """Fails if a wrong path is told to make room, or a full disk to be renamed."""
    error = RuntimeError("a library failed")
    error.__cause__ = OSError(number, os.strerror(number))
    assert find_remedy(error) == remedy
    expected = "use another" if is_elsewhere else remedy
    assert find_remedy(error, elsewhere="use another") == expected


def test_an_error_that_tensorstore_wrote_out_has_a_number():
    assert find_errno(ValueError("NOT_FOUND: [OS error 2: ENOENT No such file]")) == 2
    assert find_errno(ValueError("DATA_LOSS")) == 0


def test_what_is_no_file_is_called_what_it_is(tmp_path):
    (tmp_path / "a").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.symlink("loop", tmp_path / "loop")
    names = ("a", "link", "pipe", ".", "b", "a/b", "x" * 256, "loop")
    assert [find_fault(tmp_path / name) for name in names] == [
        "",
        "",
        "is not a regular file",
        "is a directory",
        "does not exist",
        "does not exist",
        "cannot be reached (File name too long)",
        "cannot be reached (Too many levels of symbolic links)",
    ]
