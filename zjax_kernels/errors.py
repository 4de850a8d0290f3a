"""Errors of one format, `field=value problem; remedy`."""

from collections.abc import Sequence


def describe(field: str, value: object, problem: str, remedy: str) -> str:
    """Formats an unusable argument as `field=value problem; remedy`.

    Example:
        >>> describe("block", 8, "is not a block size", "use 16")
        'block=8 is not a block size; use 16'
    """
    return f"{field}={value} {problem}; {remedy}"


def invalid(field: str, value: object, problem: str, remedy: str) -> ValueError:
    """Creates the error of an unusable argument.

    Example:
        >>> str(invalid("block", 8, "is not a block size", "use 16"))
        'block=8 is not a block size; use 16'
    """
    return ValueError(describe(field, value, problem, remedy))


def refuse(problems: Sequence[str]) -> None:
    """Raises a ValueError of all problems, one per line, if there are any.

    Example:
        >>> refuse([])
    """
    if problems:
        raise ValueError("\n".join(problems))
