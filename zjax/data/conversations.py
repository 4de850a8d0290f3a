"""Reads conversations: records of the usual layouts become OpenAI messages."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from zjax.errors import DataError, Problem
from zjax.files import parse_json

ANSWERS = "assistant"
"""Role whose messages are answers."""
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ANSWERS,
    ANSWERS: ANSWERS,
    "tool": "tool",
}
"""Roles by the names that ShareGPT writes in `from`."""
OPTIONAL = ("tools", "chat_template_kwargs")
"""Fields that a record of any layout may have."""
NO_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
"""Names that `chat_template_kwargs` cannot give."""

MAX_DEPTH = 100
"""Maximum nesting of a conversation, which is pickled for another process."""

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation, with the position of the record.

    Args:
        messages: Dicts with `role`, `content` and more keys for the template.
        trained: Flags of the messages that are answers with a loss.
        tools: Definitions of functions for the template; None without tools.
        options: More variables of the template.
        path: File of the record.
        where: Position in the file, such as `line 3`.
        unread: Fields of the record that are not read.
    """

    messages: Sequence[Message]
    trained: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]
    path: str
    where: str
    unread: Sequence[str] = ()

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raises a DataError that names the file and the record."""
        refuse(self.path, self.where, problem, remedy)


def refuse(path: str | os.PathLike, where: str, problem: str, remedy: str) -> NoReturn:
    """Raises a DataError that names the file and the record."""
    raise DataError(problem_in(path, where, problem, remedy))


def problem_in(
    path: str | os.PathLike, where: str, problem: str, remedy: str
) -> Problem:
    """Problem of a record, with the file and the position."""
    return Problem("input", str(path), f"{problem} in {where}", remedy)


def read_conversation(
    record: Mapping[str, Any], path: str | os.PathLike, where: str
) -> Conversation:
    """Reads a record by the first of `LAYOUTS` that fits the fields."""

    def fail(problem: str, remedy: str) -> NoReturn:
        refuse(path, where, problem, remedy)

    layout = _find_layout(record, fail)
    given = layout.messages(record, fail)
    if not isinstance(given, list) or not given:
        fail("has no list of messages", 'write [{"role": "user", "content": "..."}]')
    pairs = [_read_message(each, n, fail) for n, each in enumerate(given, start=1)]
    messages = [message for message, _ in pairs]
    tools, options = _read_tools(record, fail), _read_options(record, fail)
    if _is_deeper([messages, tools, options], MAX_DEPTH):
        fail(f"has values nested deeper than {MAX_DEPTH} levels", "leave them out")
    return Conversation(
        messages,
        [is_trained for _, is_trained in pairs],
        tools,
        options,
        str(path),
        where,
        [name for name in record if name not in layout.fields],
    )


Fail = Callable[[str, str], NoReturn]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Fields of a record, and a function that makes messages of the fields.

    Args:
        names: Fields that a record must have, and that are not null.
        messages: Function `messages(record, fail)` to dicts of OpenAI's format.
    """

    names: Sequence[str]
    messages: Callable[[Mapping[str, Any], Fail], Any]
    more: Sequence[str] = ()

    @property
    def fields(self) -> set[str]:
        """All fields that are read."""
        return {*self.names, *self.more, *OPTIONAL}


def _find_layout(record: Mapping[str, Any], fail: Fail) -> Layout:
    """First of `LAYOUTS` with all required names in the record."""
    # Tables fill missing fields with nulls.
    given = {name for name, value in record.items() if value is not None}
    for layout in LAYOUTS:
        if given.issuperset(layout.names):
            return layout
    shown = ", ".join(name for name in record if name in given) or "nothing"
    choices = "; ".join(" and ".join(layout.names) for layout in LAYOUTS)
    fail(f"has no conversation, only {shown},", f"name its fields as one of: {choices}")


def without_nulls(value: Any) -> Any:
    """Drops the keys that tables fill with nulls; a message's `content` stays.

    Example:
        >>> without_nulls({"role": "user", "content": None, "name": None})
        {'role': 'user', 'content': None}
    """
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_nulls(each)
        for name, each in value.items()
        # `content: null` with tool calls is a valid answer.
        if each is not None or (name == "content" and "role" in value)
    }


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and dicts are nested in more than `depth` levels."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(each, depth - 1) for each in inner)


def _read_message(message: Any, number: int, fail: Fail) -> tuple[Message, bool]:
    """Checked message without `weight`, and whether it is an answer with a loss."""
    remedy = 'write {"role": "user", "content": "..."}'
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        fail(f"has no role in message {number}", remedy)
    kept = {
        name: value
        for name, value in message.items()
        if name != "weight" and (value is not None or name == "content")
    }
    content, is_answer = message.get("content"), message["role"] == ANSWERS
    if isinstance(content, list):
        kept["content"] = _join_parts(content, number, fail)
    elif content is None and not (is_answer and message.get("tool_calls")):
        fail(f"has no content in message {number}", remedy)
    elif not isinstance(content, str | None):
        kind = type(content).__name__
        fail(f"has a {kind} as the content of message {number}", remedy)
    weight = message.get("weight")
    if weight is not None and (
        # By type, as `isinstance(True, int)` holds.
        type(weight) not in (int, float) or weight not in (0, 1)
    ):
        fail(f"has weight {weight!r} in message {number}", "use 0 or 1")
    if weight and not is_answer:
        role = message["role"]
        fail(
            f"has weight {weight!r} in message {number}, of the role {role!r},",
            f"give one to messages of {ANSWERS!r} alone",
        )
    return kept, is_answer and weight != 0


def _join_parts(parts: Sequence[Any], number: int, fail: Fail) -> str:
    """Joins the parts of a content, which must all be text."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            problem = f"has a part of type {kind!r} in message {number}"
            fail(problem, 'write {"type": "text", "text": "..."}, as only text is read')
        texts.append(part["text"])
    return "".join(texts)


def _read_tools(record: Mapping[str, Any], fail: Fail) -> list[Any] | None:
    """Reads the definitions of functions, or None."""
    tools = _read_json(record.get("tools"), "tools", fail) or None
    is_list = isinstance(tools, list) and all(isinstance(x, dict) for x in tools)
    if tools is not None and not is_list:
        fail("has tools that are no list of objects", "write those of OpenAI's format")
    return tools


def _read_options(record: Mapping[str, Any], fail: Fail) -> Mapping[str, Any]:
    """Reads the variables that a record gives to the template."""
    name = "chat_template_kwargs"
    options = _read_json(record.get(name), name, fail) or {}
    if not isinstance(options, dict):
        fail(f"has a {type(options).__name__} as {name!r}", "make it an object")
    if fixed := [each for each in NO_OPTIONS if each in options]:
        fail(f"has {fixed[0]!r} in {name}", "leave it out")
    return options


def _read_json(value: Any, name: str, fail: Fail) -> Any:
    """Value of a field that tables may hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        fail(f"has broken JSON in {name} ({error.args[0]})", "correct it")


def _from_turns(record: Mapping[str, Any], fail: Fail) -> Any:
    """Messages of ShareGPT: `from` and `value`, after a `system` of the record."""
    turns = record["conversations"]
    if not isinstance(turns, list):
        return turns
    messages = _system(record, fail)
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, dict) and "from" in turn:
            # A list, as `speaker` may be of a type without a hash.
            if (speaker := turn["from"]) not in [*SPEAKERS]:
                problem = f"has a turn from {speaker!r} in message {number}"
                fail(problem, f"use {', '.join(SPEAKERS)}")
            content = turn.get("value")
            others = {n: x for n, x in turn.items() if n not in ("from", "value")}
            turn = others | {"role": SPEAKERS[speaker], "content": content}
        messages.append(turn)
    return messages


def _from_completion(record: Mapping[str, Any], fail: Fail) -> Any:
    """Messages of `prompt` and `completion`: two texts, or two lists of messages."""
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [*_system(record, fail), *_exchange(prompt, completion)]
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        remedy = "write two strings, or two lists of messages"
        fail("has a prompt and a completion of different kinds", remedy)
    # Answers inside the prompt have no loss.
    asked = [x | {"weight": 0} if isinstance(x, dict) else x for x in prompt]
    return [*_system(record, fail), *asked, *completion]


def _from_instruction(record: Mapping[str, Any], fail: Fail) -> Any:
    """Messages of Alpaca: the input follows the instruction on a new line."""
    if record.get("history"):
        fail("has a history", "write the earlier turns as messages")
    names = ("instruction", "input", "output")
    parts = [_read_text(record, name, fail) for name in names]
    asked = "\n".join(part for part in parts[:2] if part)
    return [*_system(record, fail), *_exchange(asked, parts[2])]


def _from_answer(record: Mapping[str, Any], fail: Fail) -> Any:
    parts = [_read_text(record, name, fail) for name in ("prompt", "answer")]
    return [*_system(record, fail), *_exchange(*parts)]


def _exchange(asked: str, answer: str) -> list[Message]:
    pairs = (("user", asked), (ANSWERS, answer))
    return [{"role": role, "content": content} for role, content in pairs]


def _system(record: Mapping[str, Any], fail: Fail) -> list[Message]:
    system = _read_text(record, "system", fail)
    return [{"role": "system", "content": system}] if system else []


def _read_text(record: Mapping[str, Any], name: str, fail: Fail) -> str:
    """Text of a field; empty if missing or null."""
    value = record.get(name)
    if not isinstance(value, str | None):
        fail(f"has a {type(value).__name__} as {name!r}", "make it a string")
    return value or ""


# The first layout that fits wins: `messages` before fields that may stand beside it.
LAYOUTS = (
    Layout(("messages",), lambda record, _: record["messages"]),
    Layout(("conversations",), _from_turns, ("system",)),
    Layout(("prompt", "completion"), _from_completion, ("system",)),
    Layout(("prompt", "answer"), _from_answer, ("system",)),
    Layout(
        ("instruction", "output"), _from_instruction, ("input", "system", "history")
    ),
)
FIELDS = set().union(*(layout.fields for layout in LAYOUTS))
"""Fields that some layout reads."""
