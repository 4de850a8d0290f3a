"""Renders chat templates in a process with limits of memory and processor time.

A template is a program that comes with a checkpoint, from anywhere. Jinja's sandbox
keeps it from files and attributes, but lets it make any string and loop for ever.
"""

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zjax.data import template_worker

MAX_SECONDS = 10
"""Maximum processor time in seconds for the text of one prefix."""
MAX_BYTES = 1 << 30
"""Maximum memory (address space) of the process in bytes."""
MAX_CHARACTERS = 1 << 22
"""Maximum length of the text of one prefix: the tokenizer needs up to 350 bytes for a
character."""

BATCH_BYTES = 1 << 22
"""Bytes of a message with several conversations, about."""


class Request(NamedTuple):
    """One conversation, and the prefixes to render.

    Args:
        variables: Variables of the template besides the messages.
        prefixes: Number of messages, and `add_generation_prompt`, of each text.
    """

    template: str
    variables: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    prefixes: Sequence[tuple[int, bool]]


class Rendered(NamedTuple):
    """Texts of the prefixes of one conversation, or why there are none.

    Args:
        texts: Text of each prefix; empty after a fault.
        refusal: Message with which the template refused the conversation, or None.
        error: Reason why the template failed, or None.
    """

    texts: Sequence[str] = ()
    refusal: str | None = None
    error: str | None = None


class TemplateError(Exception):
    """A template that cannot be compiled."""


class TemplateProcess:
    """A process with the compiled templates of one checkpoint.

    Raises:
        TemplateError: A template is not valid, or too large for the limits.
    """

    def __init__(self, sources: Mapping[str, str]):
        self._sources = dict(sources)
        self._start()

    def render_each(self, requests: Iterable[Request]) -> Iterator[Rendered]:
        """Renders conversations in order; reads each answer on demand.

        The process works on later conversations meanwhile. A conversation that ends the
        process has an error; a new process renders the following conversations.
        """
        for batch in _batches(requests):
            try:
                yield from self._render_batch(batch)
            finally:
                if batch:  # the caller stopped: nobody reads the pending answers
                    self._close()

    def _render_batch(self, batch: list[bytes]) -> Iterator[Rendered]:
        """Sends a batch, and drops each request once the answer has come."""
        is_sent = False
        while batch:
            # A new process gets the pending requests again.
            if not self._close.alive:
                self._start()
                is_sent = False
            if not is_sent:
                self._send(batch)
                is_sent = True
            answer = self._receive()
            if answer is None:
                answer = {"error": self._end()}
            # The faulty request is dropped, too, before a new process gets the batch.
            del batch[0]
            yield Rendered(**answer)

    def _start(self) -> None:
        """Starts the process, and compiles the templates there."""
        # -P: modules beside the program must not hide those of the standard library.
        program = [sys.executable, "-P", template_worker.__file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(program, stdin=pipe, stdout=pipe)
        # Ends the process with this object, or at exit.
        self._close = weakref.finalize(self, _end_process, self._process)
        self._send((self._sources, (MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS)))
        answer = self._receive()
        if answer != {}:
            reason = self._end() if answer is None else answer["error"]
            self._close()
            raise TemplateError(reason)

    def _send(self, message: Any) -> None:
        """Writes a message; `_receive` finds out whether the process ended."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(message, stdin)
            stdin.flush()

    def _receive(self) -> dict[str, Any] | None:
        """Reads the next answer; None if the process ended."""
        stdout = self._process.stdout
        assert stdout is not None
        start = stdout.read(template_worker.SIZE.size)
        if len(start) < template_worker.SIZE.size:
            return None
        (size,) = template_worker.SIZE.unpack(start)
        content = stdout.read(size)
        return json.loads(content) if len(content) == size else None

    def _end(self) -> str:
        """Waits for the process to end, and returns the reason."""
        status = self._process.wait()
        self._close()
        if status == -signal.SIGXCPU:
            return f"it takes more than {MAX_SECONDS} s"
        return f"its process ended with status {status}"


def _batches(requests: Iterable[Request]) -> Iterator[list[bytes]]:
    """Pickles requests, and groups the pickles into messages of about `BATCH_BYTES`."""
    batch: list[bytes] = []
    for request in requests:
        # A tuple, as the worker cannot import Request; a pickle each, to contain
        # faults.
        batch.append(pickle.dumps(tuple(request)))
        if sum(map(len, batch)) >= BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _end_process(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()  # closes the pipes and waits
