"""A barrier that raises on all processes if one of them failed.

With a plain barrier, the others would wait for minutes for a process that failed.
"""

import contextlib
import json
from collections.abc import Iterator

import jax
from jax._src import distributed  # JAX has no public access to the coordinator's client

from zjax import errors
from zjax.errors import Problem, ZjaxError
from zjax.remedies import find_errno

_BARRIER_MILLISECONDS = 600_000
_CAUSE_LENGTH = 200


class PeerError(OSError):
    """Another process failed, with this one-line cause and `errno` (or 0)."""

    def __init__(self, process_id: int, cause: str, number: int):
        super().__init__(number, cause)
        self._text = f"process {process_id}: {cause}"

    def __str__(self) -> str:
        return self._text


@contextlib.contextmanager
def barrier(name: str) -> Iterator[None]:
    """Waits until all processes have done the enclosed work, or one has failed.

    May be used in any thread; the name must be unique in the run.

    Raises:
        ZjaxError: Another process raised it; it names that process.
        PeerError: Another process raised any other error.
    """
    if jax.process_count() == 1:
        yield
        return
    client = distributed.global_state.client
    assert client is not None
    try:
        yield
    except Exception as error:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # must not hide `error`
            client.key_value_set(f"{name}/{jax.process_index()}", _to_json(error))
            client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
        raise
    client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
    failures = client.key_value_dir_get(name)
    if failures:
        key, text = min(failures, key=lambda pair: _process_of(pair[0]))
        raise _from_json(_process_of(key), text)


def root_of(error: BaseException) -> BaseException:
    """The first error of a chain of causes."""
    while error.__cause__ is not None:  # Orbax wraps errors of TensorStore
        error = error.__cause__
    return error


def describe_error(error: BaseException) -> str:
    """Type and first line of an error's root cause, or the text of a `PeerError`."""
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
