"""A process that calls reward functions, and is replaced where a call does not end."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from zjax.errors import ConfigError, Problem, ProcessError, describe_exit
from zjax.files import parse_json
from zjax.rl import reward_worker
from zjax.rl.reward_worker import Answer, read_answer

SECONDS_TO_IMPORT = 120.0
"""Maximum time in which a process imports all functions."""
SECONDS_MORE = 5.0
"""Time after a limit, when a process ends by itself: this process is gone."""
_MAX_BYTES = 1 << 20
_STARTING = object()
"""Mark of a process that imports the functions."""


class RewardProcess:
    """A process with imported reward functions.

    Args:
        names: Reward functions, as `module:function`.
        seconds: Maximum time of a call.

    Attributes:
        connection: Connection that has the next answer.
        deadline: Time by `time.monotonic` at which the call, or the start, must end.
    """

    def __init__(self, names: Sequence[str], seconds: float):
        self._names, self._seconds = [*names], seconds
        self.start()

    def start(self) -> None:
        """Starts the process, or a new one in place of the process so far."""
        self.connection, other = multiprocessing.Pipe()
        # -P: modules beside the program must not hide those of the user.
        program = [sys.executable, "-P", reward_worker.__file__, str(other.fileno())]
        # Functions get no accelerator, and hash alike in all processes.
        alike = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        try:
            self._process = subprocess.Popen(
                program,
                env=os.environ | alike,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,  # no Ctrl-C; lets `_end` end children, too
            )
        except OSError as error:
            problem = f"cannot be started ({error.strerror})"
            remedy = "use fewer processes, or free memory"
            raise ProcessError(
                Problem("rewards", self._names, problem, remedy)
            ) from error
        finally:
            other.close()
        # Ends the process with this object, or at exit.
        self.close = weakref.finalize(self, _end, self._process, self.connection)
        self._call, self.deadline = _STARTING, _after(SECONDS_TO_IMPORT)
        limits = [x + SECONDS_MORE for x in (SECONDS_TO_IMPORT, self._seconds)]
        self._send((sys.path, self._names, *limits))

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a call."""
        return self._call is None

    def call(self, mark: Any, message: tuple[Any, ...]) -> None:
        """Begins a call: number of the function, prompt, completion and row.

        `mark` is returned with the answer, and is not None.
        """
        self._call, self.deadline = mark, _after(self._seconds)
        self._send(message)

    def receive(self) -> tuple[Any, Answer] | None:
        """Returns the mark and the answer of the call; None after the start.

        Raises:
            ConfigError: Functions cannot be imported.
            ProcessError: The process ended before it had imported the functions.
        """
        try:
            answer = parse_json(self.connection.recv_bytes(_MAX_BYTES))
            reward = None if self._call is _STARTING else read_answer(answer)
        except (EOFError, OSError):  # the process ended
            status = self._process.wait()
            return self._replace(f"ended the process by {describe_exit(status)}")
        except ValueError:  # by code that found the connection
            return self._replace("wrote what is no answer to the connection")
        mark, self._call = self._call, None
        if reward is not None:
            return mark, reward
        problems = [
            Problem("rewards", name, fault, "run where Python finds it, or mend it")
            for name, fault in zip(self._names, answer, strict=True)
            if fault
        ]
        if problems:
            raise ConfigError(*problems)
        return None

    def expire(self) -> tuple[Any, Answer]:
        """Ends a call at the deadline, as `receive` returns it."""
        return self._replace(f"took more than {self._seconds:g} s")

    def _replace(self, reason: str) -> tuple[Any, Answer]:
        """Starts a new process; returns the failure of the call."""
        self.close()
        if self._call is _STARTING:
            limit = f"{SECONDS_TO_IMPORT:g} s"
            problem = f"could not be imported within {limit}, or ended the process"
            remedy = "import fewer and smaller modules"
            raise ProcessError(Problem("rewards", self._names, problem, remedy))
        mark = self._call
        self.start()
        return mark, (None, reason)

    def _send(self, message: Any) -> None:
        """Sends a message; `receive` finds out whether the process ended."""
        with contextlib.suppress(OSError):
            self.connection.send(message)


def _after(seconds: float) -> float:
    """Returns the time in a number of seconds."""
    return time.monotonic() + seconds


def _end(process: subprocess.Popen, connection: Any) -> None:
    """Ends a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()
