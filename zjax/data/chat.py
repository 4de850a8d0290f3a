"""Conversations as text: the chat template of a tokenizer, and which text is an answer.

A template is a Jinja program in `chat_template.jinja` or `tokenizer_config.json`; it is
run in a sandbox, with the functions that transformers gives it. The answer of a turn is
what the conversation up to it has beyond the same conversation before it, with the
prompt that asks for an answer: its end of turn is part of it.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from zjax.data import tokenizer as text
from zjax.errors import DataError, Problem
from zjax.packages import check_installed
from zjax.reading import parse_json, read_text

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_NAME = "tokenizer.json"
MAX_CONFIG_BYTES = 1 << 26
"""Largest `tokenizer_config.json` or template."""
ANSWERS = "assistant"
"""Role whose messages are answers."""

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Chat:
    """A template, with the tokenizer that it is for.

    Args:
        folder: Where they come from, for messages.
        render: `render(messages, add_generation_prompt) -> text`.
        encode: `encode(text) -> (ids, first character of each token)`.
    """

    folder: str
    render: Callable[[Sequence[Message], bool], str]
    encode: Callable[[str], tuple[np.ndarray, np.ndarray]]

    def tokens_of(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation.

        Args:
            messages: Dicts with `role` and `content`.

        Returns:
            Token ids, int32, and whether each is part of an answer, uint8.

        Raises:
            DataError: The template refuses the messages, has no answer among them, or
                writes a turn that depends on later ones.
        """
        whole = self.render(messages, False)
        ids, starts = self.encode(whole)
        answers = np.zeros(len(ids), np.uint8)
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS:
                begin = self.render(messages[:number], True)
                end = self.render(messages[: number + 1], False)
                if not (end.startswith(begin) and whole.startswith(end)):
                    problem = f"writes message {number + 1} not after the ones before"
                    self.refuse(problem, "use a template that appends turns")
                answers |= (len(begin) <= starts) & (starts < len(end))
        if not answers.any():
            self.refuse("finds no answer in a conversation", "leave it out")
        return ids, answers

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raises an error that names the template."""
        raise DataError(Problem("chat", self.folder, problem, remedy))


def load_chat(folder: str) -> Chat:
    """Reads the template and the tokenizer of a Hugging Face checkpoint.

    Args:
        folder: Directory with `tokenizer.json`, `tokenizer_config.json` and, if the
            latter has no template, `chat_template.jinja`.

    Returns:
        What encodes conversations.

    Raises:
        DataError: A file is missing or broken, or there is no template.
    """
    check_installed("jinja2")
    check_installed("tokenizers")
    import jinja2
    import tokenizers

    place = pathlib.Path(folder)
    config = _read_config(place)
    content = text.read_file(place / TOKENIZER_NAME)
    problem = "has a tokenizer.json that is not of the tokenizers library"
    with text.data_errors(folder, problem, "give the files of a checkpoint"):
        library = tokenizers.Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    try:
        template = _environment().from_string(_find_template(place, config))
    except jinja2.TemplateError as error:
        problem = f"has a chat template that cannot be read ({error})"
        raise DataError(_problem(folder, problem)) from error
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }

    def render(messages: Sequence[Message], asks: bool) -> str:
        values = special | {"messages": messages, "add_generation_prompt": asks}
        try:
            return template.render(values)
        except (jinja2.TemplateError, TypeError) as error:
            problem = f"has a chat template that refuses messages ({error})"
            raise DataError(_problem(folder, problem)) from error

    def encode(whole: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = library.encode(whole, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return np.array(encoding.ids, np.int32), np.array(starts, np.int64)

    return Chat(folder, render, encode)


def _problem(folder: str, problem: str) -> Problem:
    remedy = "give the directory of a checkpoint with a chat template"
    return Problem("chat", folder, problem, remedy)


def _read_config(place: pathlib.Path) -> dict[str, Any]:
    try:
        config = parse_json(read_text(place / CONFIG_NAME, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"has no {CONFIG_NAME} that can be read ({reason})"
        raise DataError(_problem(str(place), problem)) from error
    if not isinstance(config, dict):
        raise DataError(_problem(str(place), f"has a broken {CONFIG_NAME}"))
    return config


def _find_template(place: pathlib.Path, config: Mapping[str, Any]) -> str:
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found}.get(
            "default"
        )
    try:
        if (place / TEMPLATE_NAME).is_file():
            found = read_text(place / TEMPLATE_NAME, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        problem = f"has a {TEMPLATE_NAME} that cannot be read ({error})"
        raise DataError(_problem(str(place), problem)) from error
    if not isinstance(found, str):
        raise DataError(_problem(str(place), "has no chat template"))
    return found


def _environment() -> Any:
    """A sandbox with the functions and tags that transformers gives a template."""
    import jinja2
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """The tag around an answer, whose body is all that it writes."""

        def __init__(self, environment: Any):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, Generation],
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
