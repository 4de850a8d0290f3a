"""One wording for all errors: what is wrong, and the way out."""

from collections.abc import Sequence


def describe(field: str, value: object, problem: str, remedy: str) -> str:
    """One line on an argument that cannot be used.

    Args:
        field: Name of the argument.
        value: What was given.
        problem: What is wrong with it.
        remedy: What to give instead.

    Returns:
        The line.

    Example:
        >>> describe("block", 8, "is not a size of blocks", "use 16")
        'block=8 is not a size of blocks; use 16'
    """
    return f"{field}={value} {problem}; {remedy}"


def invalid(field: str, value: object, problem: str, remedy: str) -> ValueError:
    """An argument that cannot be used.

    Args:
        field: Name of the argument.
        value: What was given.
        problem: What is wrong with it.
        remedy: What to give instead.

    Returns:
        The error to raise.

    Example:
        >>> str(invalid("block", 8, "is not a size of blocks", "use 16"))
        'block=8 is not a size of blocks; use 16'
    """
    return ValueError(describe(field, value, problem, remedy))


def refuse(problems: Sequence[str]) -> None:
    """Tells of all problems at once, a line each; does nothing where there is none.

    Args:
        problems: What `describe` returned, in the order it should be read.

    Raises:
        ValueError: There are problems.

    Example:
        >>> refuse([])
    """
    if problems:
        raise ValueError("\n".join(problems))
