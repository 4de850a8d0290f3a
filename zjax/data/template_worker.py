"""Program of the process that renders chat templates: `TemplateProcess` starts it.

The program imports nothing of zjax, to start fast. It reads pickles from standard
input, which a trusted process writes, and answers in JSON, since a template that breaks
out of the sandbox could write any pickle.
"""

import contextlib
import datetime
import json
import math
import pickle
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks that the tag `generation` writes around the body: noncharacters, which no text
has."""
SIZE = struct.Struct("<Q")
"""Size in bytes of the message that follows."""
_MAX_SHOWN = 1_000
"""Maximum number of characters of a reason."""


class Refusal(Exception):
    """A template does not take the messages."""


def main() -> None:
    """Compiles the templates of the first message, then renders each request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sources, (seconds, num_bytes, num_characters) = pickle.load(requests)
    # SIGXCPU, the end of a template that runs too long, would dump core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # the process has a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    _limit_seconds(seconds)
    try:
        environment = _environment()
        templates = {n: environment.from_string(text) for n, text in sources.items()}
    except Exception as error:  # also of Python's compiler, for deep nesting
        _send(answers, {"error": _reason(error)})
        return
    _send(answers, {})
    while True:
        try:
            batch = pickle.load(requests)
        except EOFError:
            return
        for request in batch:
            answer = _render(templates, request, seconds, num_characters)
            try:
                _send(answers, answer)
            except BrokenPipeError:  # the parent was killed
                return


def _render(
    templates: Mapping[str, Any], request: bytes, seconds: float, num_characters: int
) -> dict[str, Any]:
    """Renders all prefixes of one conversation, or returns the reason of a fault."""
    texts = []
    try:
        # Inside the try: the messages alone may exceed the memory limit.
        name, variables, messages, prefixes = pickle.loads(request)
        for number, asks in prefixes:
            _limit_seconds(seconds)
            given = {"messages": messages[:number], "add_generation_prompt": asks}
            texts.append(templates[name].render(variables | given))
            if len(texts[-1]) > num_characters:
                reason = f"its text has more than {num_characters:,} characters"
                return {"error": reason}
    except Refusal as error:
        return {"refusal": str(error)[:_MAX_SHOWN]}
    except Exception as error:  # of any kind: a template may compute anything
        return {"error": _reason(error)}
    return {"texts": texts}


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return f"{type(error).__name__}: {error}"[:_MAX_SHOWN]


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    """Writes one answer, at once: the next request may end this process."""
    try:
        content = json.dumps(answer).encode()
    except MemoryError as error:
        content = json.dumps({"error": _reason(error)}).encode()
    answers.write(SIZE.pack(len(content)) + content)
    answers.flush()


def _limit_seconds(seconds: float) -> None:
    """Lets the kernel end this process after so many more seconds of processor time.

    A timer in Python would wait for a long call of C, such as a power of integers.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    end = math.ceil(time.process_time() + seconds)
    if most != resource.RLIM_INFINITY:
        end = min(end, most)
    # The hard limit stays: a lowered limit could not be raised for the next text.
    resource.setrlimit(resource.RLIMIT_CPU, (end, most))


def _environment() -> Any:
    """Makes a sandbox with the functions and tags that transformers offers."""
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Tag around an answer, which writes marks around the body."""

        def __init__(self, environment: Any):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line)
                for mark in (OPEN, CLOSE)
            )
            return [first, *body, last]

    def raise_exception(message: str) -> NoReturn:
        raise Refusal(message)

    # Jinja's own tojson escapes HTML.
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, Generation],
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


if __name__ == "__main__":
    main()
