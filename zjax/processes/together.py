"""What all processes do together: where one of them fails, all end and name it.

A process that fails alone leaves the others at a barrier, which waits for minutes.
"""

import contextlib
import json
from collections.abc import Iterator

import jax
from jax._src import distributed  # the only way to the client of the coordinator

from zjax import errors
from zjax.errors import Problem, ZjaxError
from zjax.remedies import find_errno

_BARRIER_MILLISECONDS = 600_000
_CAUSE_LENGTH = 200


class PeerError(OSError):
    """Another process failed; `errno` is that of its error, or 0.

    Args:
        process_id: Which process.
        cause: Its error, in one line.
        number: The `errno`, or 0.
    """

    def __init__(self, process_id: int, cause: str, number: int):
        super().__init__(number, cause)
        self._text = f"process {process_id}: {cause}"

    def __str__(self) -> str:
        return self._text


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """Waits until all processes have done the enclosed work, or one has failed at it.

    May be used in any thread.

    Args:
        name: Of the work, by which processes know it; used once in a run.

    Yields:
        Nothing.

    Raises:
        ZjaxError: Another process raised it; of the same type, and names the process.
        PeerError: Another process raised another error.
    """
    if jax.process_count() == 1:
        yield
        return
    client = distributed.global_state.client
    assert client is not None
    try:
        yield
    except Exception as error:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # or it hides this one
            client.key_value_set(f"{name}/{jax.process_index()}", _to_json(error))
            client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
        raise
    client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
    told = client.key_value_dir_get(name)
    if told:
        key, text = min(told, key=lambda pair: _process_of(pair[0]))
        raise _from_json(_process_of(key), text)


def root_of(error: BaseException) -> BaseException:
    """The first of the errors from which one was raised.

    Args:
        error: Any.

    Returns:
        Itself, if it was raised from none.
    """
    while error.__cause__ is not None:  # Orbax wraps what TensorStore said
        error = error.__cause__
    return error


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line.

    Args:
        error: Any.

    Returns:
        The type of its root, and the start of what that says; of a `PeerError` the
        process first.
    """
    error = root_of(error)
    if isinstance(error, PeerError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:_CAUSE_LENGTH]}"


def _to_json(error: Exception) -> str:
    problems = error.problems if isinstance(error, ZjaxError) else ()
    record = {
        "cause": describe_error(error),
        "errno": find_errno(error),
        "kind": type(error).__name__,
        "problems": [vars(problem) for problem in problems],
    }
    return json.dumps(record, default=str)


def _process_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def _from_json(process_id: int, text: str) -> Exception:
    record = json.loads(text)
    peer = PeerError(process_id, record["cause"], record["errno"])
    if not record["problems"]:
        return peer
    named = [
        Problem(**fields | {"field": f"process {process_id}: {fields['field']}"})
        for fields in record["problems"]
    ]
    error = getattr(errors, record["kind"])(*named)
    error.__cause__ = peer
    return error
