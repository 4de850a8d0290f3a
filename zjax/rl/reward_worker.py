"""Calls reward functions, as a program that `RewardProcess` starts.

The standard library alone is imported: the program starts at once, and no device of JAX
is taken by it.
"""

import faulthandler
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

_MAX_CHARACTERS = 300
_LARGEST = 1e9
"""Largest reward: the squares of a rollout's weighted rewards fit in float32."""

Answer = tuple[float | None, str]
"""Reward or None, and the reason of a failure, which is "" without a failure."""


def load(name: str) -> tuple[Callable[..., Any] | None, str]:
    """Imports `module:function`, or says why that is no function."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except BaseException as error:  # the user's module may raise anything
        return None, f"cannot be imported ({_describe(error)})"
    if not callable(function):
        return None, "names no function"
    return function, ""


def call(
    function: Callable[..., Any], prompt: Any, completion: str, row: Mapping[str, Any]
) -> Answer:
    """Calls a function, and checks what it returned.

    Example:
        >>> call(lambda prompt, completion, **row: completion == "4", "2 + 2", "4", {})
        (1.0, '')
        >>> call(lambda prompt, completion, **row: "4", "2 + 2", "4", {})
        (None, "returned '4', which is no number")
    """
    try:
        value = function(prompt, completion, **row)
    # `sys.exit` of the user's function ends no process.
    except BaseException as error:
        return None, _describe(error)
    return (None, "") if value is None else read_reward(value)


def read_reward(value: Any) -> Answer:
    """Reads a value as a finite number."""
    shown = _show(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except BaseException:  # `__float__` of the user's class may raise anything
        return None, f"returned {shown}, which is no number"
    if not math.isfinite(number):
        return None, f"returned {shown}, which is not finite"
    if abs(number) > _LARGEST:
        return None, f"returned {shown}, beyond {_LARGEST:g}"
    return number, ""


def read_answer(given: Any) -> Answer:
    """Reads an answer of `call`, in place of which code of a model may have written.

    Raises:
        ValueError: The value is no answer.

    Example:
        >>> read_answer([1, ""]), read_answer([math.nan, ""])
        ((1.0, ''), (None, 'returned nan, which is not finite'))
    """
    match given:
        case [None, str(reason)]:
            return None, reason
        case [reward, ""]:
            return read_reward(reward)
    raise ValueError("is no answer")


def _show(value: Any, show: Callable[[Any], str] = repr) -> str:
    """Shows a value in a few characters, or the class if the value cannot be shown."""
    try:
        return show(value)[:_MAX_CHARACTERS]
    except BaseException:  # the user's class may raise anything
        return f"<{type(value).__name__}>"


def _describe(error: BaseException) -> str:
    """Describes an exception in a line."""
    text = " ".join(_show(error, str).split())
    return f"{type(error).__name__}: {text}"[:_MAX_CHARACTERS]


def _send(connection: Connection, answer: Any) -> None:
    """Sends JSON: a function that runs code of a model could send any pickle."""
    connection.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Imports functions, then answers calls until the other end is closed."""
    os.dup2(2, 1)  # what functions print is no output of the run
    connection = Connection(int(sys.argv[1]))
    # Ends this process, where the process that counts the time was killed, by a thread
    # that does not wait for the lock of the interpreter.
    with open(os.devnull, "w") as nowhere:
        watch = {"exit": True, "file": nowhere}
        sys.path[:], names, seconds_to_import, seconds = connection.recv()
        faulthandler.dump_traceback_later(seconds_to_import, **watch)
        found = [load(name) for name in names]
        faulthandler.cancel_dump_traceback_later()
        _send(connection, [fault for _, fault in found])
        while True:
            try:
                number, *given = connection.recv()
            except EOFError:
                return
            function, _ = found[number]
            assert function is not None
            faulthandler.dump_traceback_later(seconds, **watch)
            answer = call(function, *given)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, answer)


if __name__ == "__main__":
    main()
