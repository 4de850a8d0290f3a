"""Functions that a setting names as `module:function`."""

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_NAME = re.compile(r"[\w.]+:\w+")


class Fault(NamedTuple):
    """Reason why a function cannot be used, with the remedy."""

    problem: str
    remedy: str


def is_function_name(name: str) -> bool:
    """Whether a text has the form `module:function`.

    Example:
        >>> is_function_name("math:sqrt"), is_function_name("sqrt")
        (True, False)
    """
    return _NAME.fullmatch(name) is not None


def find_function(name: str) -> Callable[..., Any] | Fault:
    """Imports a function by the name `module:function`, or returns the fault.

    Example:
        >>> find_function("math:fsum")([1, 2])
        3.0
        >>> find_function("math:nothing").problem
        'names no function'
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    # Importing runs the user's module, which may raise anything.
    except Exception as error:
        problem = f"cannot be imported ({type(error).__name__}: {error})"
        return Fault(problem, "run where Python finds the module, or mend it")
    if not callable(function):
        return Fault("names no function", f"define {attribute} in {module}")
    return function
