"""Sends metrics to network services from one thread, so that no step waits.

Rows that a service does not take are kept in a file of the run's directory, and sent
when the run ends or is continued.
"""

import collections
import itertools
import math
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from absl import logging

from zjax.errors import OutputError, Problem
from zjax.files import writing
from zjax.observe.history import json_line, read_json_lines, replace_text
from zjax.observe.metrics import Value, scalars

MAX_PENDING = 1_000
"""Maximum number of rows in memory; more go to the file."""
OPEN_SECONDS = 60.0
"""Seconds that a run waits for services before the first step."""
SLOW_SECONDS = 60.0
"""Seconds that a service may be silent before a warning."""
CLOSE_SECONDS = 60.0
"""Seconds that a run that has ended, and saved, waits for services."""


@runtime_checkable
class Service(Protocol):
    """Network service; one thread calls the methods, and each call may hang."""

    name: str
    settings: str
    """Settings to look at if the service cannot be reached."""

    def open(self) -> None:
        """Connects to the service, and starts or continues the run there."""

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the values of one step."""

    def close(self) -> None:
        """Ends the run of the service."""

    def sync_command(self) -> str:
        """Shell command that sends data which the package keeps on disk, or ""."""
        ...


class _Row(NamedTuple):
    """Values of a step for one service."""

    service: Service
    step: int
    values: Mapping[str, float]


class Delivery:
    """Sends metrics to services from a thread; a sink.

    Rows that a service refuses, and rows beyond `MAX_PENDING`, go to the file
    `<service>_unsent.jsonl`.

    Args:
        last_step: Last step of the run that is continued: unsent rows up to that step
            are sent first. 0 starts a new run.

    Raises:
        OutputError: A service refuses the run within `OPEN_SECONDS`.
    """

    def __init__(
        self,
        services: Sequence[Service],
        directory: pathlib.Path,
        *,
        last_step: int = 0,
    ) -> None:
        self._services = tuple(services)
        self._unsent = {x.name: _UnsentRows(directory, x, last_step) for x in services}
        self._pending = collections.deque[_Row]()
        self._changed = threading.Condition(threading.RLock())
        """Guards `_pending`, the files and the fields below."""
        self._called, self._called_at = self._services[0], math.inf
        """Service that was called last, and start of the running call; infinite for
        none."""
        self._open = set[str]()
        self._warned = set[tuple[str, str]]()
        self._has_started = self._is_closing = False
        self._error: Exception | None = None
        self._ready = threading.Event()
        # A daemon: a call that hangs must not keep the program alive.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        # A run starts without a service that hangs, but not if a service refuses.
        if not self._ready.wait(OPEN_SECONDS):
            self._warn_of_silence()
        with self._changed:
            self._has_started = True
            self._raise_error()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Hands values of one step to the thread; raises an error of the thread."""
        numbers = scalars(values)
        with self._changed:
            self._raise_error()
            is_full = len(self._pending) >= MAX_PENDING
            rows = [_Row(service, step, numbers) for service in self._services]
            # To the file: memory stays bounded while a service hangs.
            if is_full:
                for row in rows:
                    self._keep(row)
            else:
                self._pending.extend(rows)
            self._changed.notify()
            is_silent = time.monotonic() - self._called_at > SLOW_SECONDS
            if self._pending and (is_full or is_silent):
                self._warn_of_silence()

    def close(self) -> None:
        """Waits until the services have taken all, for at most `CLOSE_SECONDS`."""
        with self._changed:
            # On disk first: a kill during the wait loses at most the row being sent.
            for row in itertools.islice(self._pending, 1, None):
                self._keep(row)
            self._pending = collections.deque(itertools.islice(self._pending, 1))
            self._is_closing = True
            self._changed.notify()
        # Without the lock, which the thread needs.
        self._thread.join(CLOSE_SECONDS)
        with self._changed:
            if self._thread.is_alive():
                self._warn_of_silence()
                for row in self._pending:
                    self._keep(row)
            for service in self._services:
                self._warn_of_unsent(service)
            self._raise_error()

    def _work(self) -> None:
        """Opens the services, sends all rows, and closes the services."""
        try:
            for service in self._services:
                self._start(service)
                self._send_unsent(service)
            self._ready.set()
            for row in self._next_rows():
                is_sent = self._send(row)
                with self._changed:
                    self._pending.popleft()  # only now: `close` keeps what is pending
                    if not is_sent:
                        self._keep(row)
            for service in self._services:
                self._send_unsent(service)
                if service.name in self._open:
                    self._close(service)
        except OutputError as error:
            self._error = error
            # Also after a refusal, or the constructor would wait in vain.
            self._ready.set()

    def _start(self, service: Service) -> None:
        """Opens a service; a refusal ends a run that has not started."""
        error = self._call(service, service.open)
        with self._changed:
            if error is None:
                self._open.add(service.name)
            elif not self._has_started:
                remedy = f"look at {service.settings}, or leave it out"
                problem = Problem(
                    "observe.sinks", service.name, _refused(error), remedy
                )
                raise OutputError(problem) from error
            else:
                self._warn(service, _refused(error))

    def _close(self, service: Service) -> None:
        """Ends the run of a service; warns if the service refuses."""
        error = self._call(service, service.close)
        if error is not None:
            problem = f"has not ended its run ({_first_line(error)})"
            self._warn(service, problem)

    def _next_rows(self) -> Iterator[_Row]:
        """Yields the first pending row until the run ends; the caller removes rows."""
        while True:
            with self._changed:
                while not (self._pending or self._is_closing):
                    self._changed.wait()
                if not self._pending:
                    return
                row = self._pending[0]
            yield row

    def _send(self, row: _Row) -> bool:
        """Sends a row, after opening a closed service; returns whether it was taken."""
        if row.service.name not in self._open:
            self._start(row.service)
        if row.service.name not in self._open:
            return False
        error = self._call(row.service, lambda: row.service.send(row.step, row.values))
        if error is not None:
            self._warn(row.service, _refused(error))
        return error is None

    def _send_unsent(self, service: Service) -> None:
        """Sends the rows in the file of a service; refused rows stay there."""
        unsent = self._unsent[service.name]
        with self._changed:
            rows = unsent.read()
        # Without the lock, so that no step waits.
        refused = [row for row in rows if not self._send(_Row(service, *row))]
        with self._changed:
            unsent.replace_first(len(rows), refused)

    def _call(self, service: Service, call: Callable[[], None]) -> BaseException | None:
        """Calls a service and returns the error that it raises, of any kind."""
        with self._changed:
            self._called, self._called_at = service, time.monotonic()
        try:
            call()
        except BaseException as error:  # SystemExit would end only the thread
            return error
        finally:
            self._called_at = math.inf
        return None

    def _keep(self, row: _Row) -> None:
        """Writes a row to the file of the service."""
        self._unsent[row.service.name].add(row.step, row.values)

    def _raise_error(self) -> None:
        """Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _warn_of_silence(self) -> None:
        """Warns that a service does not answer, or is slower than the run."""
        waiting = f"is slow to answer ({len(self._pending):,} rows wait)"
        self._warn(self._called, waiting)

    def _warn(self, service: Service, problem: str) -> None:
        """Warns of a problem of a service, once for each kind."""
        kind = service.name, problem.partition("(")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            path = self._unsent[service.name].path
            remedy = f"look at {service.settings}; the run goes on, and {path} keeps "
            remedy += "what is not sent"
            logging.warning(
                "%s", Problem("observe.sinks", service.name, problem, remedy)
            )

    def _warn_of_unsent(self, service: Service) -> None:
        """Warns of rows that a service has not taken, and says how to send the rows."""
        num_rows = len(self._unsent[service.name].read())
        remedies = ["run the same command again to send them"] if num_rows else []
        has_failed = any(name == service.name for name, _ in self._warned)
        if has_failed and (command := service.sync_command()):
            remedies.append(f"`{command}` sends what the package itself holds")
        if remedies:
            path = self._unsent[service.name].path
            problem = f"has not taken {num_rows} rows of metrics ({path})"
            remedy = ", and ".join(remedies)
            logging.warning(
                "%s", Problem("observe.sinks", service.name, problem, remedy)
            )


class _UnsentRows:
    """Rows in the file of one service."""

    def __init__(
        self, directory: pathlib.Path, service: Service, last_step: int
    ) -> None:
        self.path = directory / f"{service.name}_unsent.jsonl"
        rows = self.read()
        # Steps after `last_step` run again, and send new rows.
        earlier = [row for row in rows if last_step and row[0] <= last_step]
        self.replace_first(len(rows), earlier)

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Returns step and values of each row."""
        with writing(self.path):
            rows = read_json_lines(self.path)[0]
        return [(int(row.pop("step")), row) for row in map(scalars, rows)]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a row."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **values}))

    def replace_first(
        self, num_rows: int, rows: Sequence[tuple[int, Mapping[str, float]]]
    ) -> None:
        """Replaces the first rows of the file; removes a file without rows."""
        # Further rows were added while the first rows were sent.
        rows = [*rows, *self.read()[num_rows:]]
        with writing(self.path):
            if rows:
                lines = [json_line({"step": step, **values}) for step, values in rows]
                replace_text(self.path, "".join(lines))
            else:
                self.path.unlink(missing_ok=True)


def _refused(error: BaseException) -> str:
    """Says in one line how a service failed."""
    return f"cannot be written to ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error, or the name of the error's class."""
    return str(error).partition("\n")[0] or type(error).__name__
