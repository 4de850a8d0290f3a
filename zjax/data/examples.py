"""Reads examples: completions of one prompt that were compared, labelled or given.

Records have the fields of TRL and DeepSpeed-Chat, as texts or as lists of messages.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from zjax.data.conversations import (
    ANSWERS,
    OPTIONAL,
    Conversation,
    problem_in,
    read_conversation,
    refuse,
)
from zjax.errors import DataError, Problem

COMPLETIONS, PAIRS, RANKED, LABELS = "completions", "pairs", "ranked", "labels"
"""Kinds of examples."""
COMPARED = PAIRS, RANKED, LABELS
"""Kinds that hold two completions or more for each prompt. Beside a labelled completion
stands another example's completion, which fits the prompt by chance alone."""


class Layout(NamedTuple):
    """Fields of the records of a kind."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """All fields that are read."""
        return frozenset((*self.needed, *self.optional, "system", *OPTIONAL))


LAYOUTS = {
    COMPLETIONS: Layout(("prompt", "completion"), ("chosen",)),
    PAIRS: Layout(("chosen", "rejected"), ("prompt",)),
    RANKED: Layout(("prompt", "completions"), ("scores",)),
    LABELS: Layout(("prompt", "completion", "label")),
}
"""Layouts by kind of examples."""


class Text(NamedTuple):
    """A prompt and a completion as plain texts."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Example:
    """Completions of one prompt, the best first, with the position of the record.

    Args:
        sequences: Prompt and completion of each, all texts or all conversations.
        num_asked: Number of messages of the prompt, in conversations.
        is_desirable: Label of the completion, or None.
        path: File of the record.
        where: Position in the file, such as `line 3`.
        unread: Fields of the record that are not read.
    """

    sequences: tuple[Text | Conversation, ...]
    num_asked: int
    is_desirable: bool | None
    path: str
    where: str
    unread: Sequence[str] = ()

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raises a DataError that names the file and the record."""
        refuse(self.path, self.where, problem, remedy)

    @property
    def prompt(self) -> tuple[Any, ...]:
        """All that the completion answers, to compare with other prompts."""
        given = self.sequences[0]
        if isinstance(given, Text):
            return (given.prompt,)
        return given.messages[: self.num_asked], given.tools, given.options

    def followed_by(self, other: "Example") -> Text | Conversation:
        """Joins the prompt and the first completion of another example."""
        own, given = self.sequences[0], other.sequences[0]
        if isinstance(own, Text) and isinstance(given, Text):
            return own._replace(completion=given.completion)
        assert isinstance(own, Conversation) and isinstance(given, Conversation)
        asked, answered = self.num_asked, other.num_asked
        return dataclasses.replace(
            own,
            messages=[*own.messages[:asked], *given.messages[answered:]],
            trained=[*own.trained[:asked], *given.trained[answered:]],
        )


def read_example(
    record: Mapping[str, Any],
    path: str | os.PathLike[str],
    where: str,
    *,
    kind: str,
    has_template: bool,
) -> Example:
    """Reads a record of a kind of `LAYOUTS`; one error names all that is wrong.

    With a chat template, texts become a user's message and an answer, and lists of
    messages are read. Completions without a prompt share the start that is equal in
    all: whole messages, or words.
    """
    reader = _Reader(str(path), where, kind, has_template)
    given = {name: value for name, value in record.items() if value is not None}
    if kind == COMPLETIONS and "chosen" in given:
        given.setdefault("completion", given["chosen"])
    reader.check_names(given)
    label = reader.label(given)
    completions = reader.completions(given)
    prompt = reader.prompt(given)
    reader.raise_problems()
    asked, sequences = reader.sequences(prompt, completions, given)
    reader.raise_problems()
    fields = LAYOUTS[kind].fields - (set() if has_template else {"system", *OPTIONAL})
    unread = [name for name in record if name not in fields]
    return Example(tuple(sequences), asked, label, str(path), where, unread)


@dataclasses.dataclass
class _Reader:
    """Reads the fields of one record, and collects the problems."""

    path: str
    where: str
    kind: str
    has_template: bool
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def note(self, problem: str, remedy: str) -> None:
        """Adds a problem of the record."""
        self.problems.append(problem_in(self.path, self.where, problem, remedy))

    def raise_problems(self) -> None:
        """Raises all problems so far."""
        if self.problems:
            raise DataError(*self.problems)

    def check_names(self, given: Mapping[str, Any]) -> None:
        """Notes required fields that are missing or null."""
        needed = LAYOUTS[self.kind].needed
        if missing := [name for name in needed if name not in given]:
            shown = " and no ".join(map(repr, missing))
            found = ", ".join(given) or "nothing"
            remedy = f"name the fields of {self.kind} {', '.join(needed)}"
            self.note(f"has no {shown}, only {found},", remedy)

    def label(self, given: Mapping[str, Any]) -> bool | None:
        """Reads whether a completion is desirable; None without labels."""
        if self.kind != LABELS or "label" not in given:
            return None
        value = given["label"]
        # By type as well, as 1.0 == True holds.
        if type(value) not in (bool, int) or value not in (0, 1):
            self.note(f"has the label {value!r}", "write true or false")
        return bool(value)

    def completions(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Reads completions by name, the best first."""
        names = {PAIRS: ("chosen", "rejected"), RANKED: ()}
        named = {
            name: given[name]
            for name in names.get(self.kind, ("completion",))
            if name in given
        }
        if self.kind == RANKED and "completions" in given:
            named = self._ranked(given["completions"], given.get("scores"))
        for name, value in named.items():
            self._check_content(name, value)
        kinds = {type(value) for value in named.values()} & {str, list}
        if len(kinds) > 1:
            remedy = "write texts, or lists of messages"
            self.note("has completions of different kinds", remedy)
        values = list(named.items())
        for number, (name, value) in enumerate(values):
            for other, same in values[:number]:
                if value == same:
                    self.note(f"has equal {other!r} and {name!r}", "leave it out")
        return named

    def _ranked(self, values: Any, scores: Any) -> dict[str, Any]:
        """Reads a list of completions by name, sorted by scores if there are any."""
        if not isinstance(values, list) or len(values) < 2:
            self.note("has no list of two completions or more", "leave it out")
            return {}
        named = {f"completions[{n}]": value for n, value in enumerate(values)}
        if scores is None:
            return named
        is_list = isinstance(scores, list) and len(scores) == len(values)
        if not is_list or not all(map(_is_number, scores)):
            problem = f"has scores that are not {len(values)} finite numbers"
            self.note(problem, "give one for each completion, or none at all")
            return named
        if len(set(scores)) < len(scores):
            problem = "has completions of equal scores"
            self.note(problem, "leave out all but one of them")
        order = sorted(zip(named.items(), scores, strict=True), key=lambda x: -x[1])
        return dict(item for item, _ in order)

    def prompt(self, given: Mapping[str, Any]) -> Any:
        """Reads the prompt: a text, messages, or None."""
        prompt = given.get("prompt")
        # An empty text is a prompt, too: a completion may follow BOS alone.
        if prompt is not None and prompt != "":
            self._check_content("prompt", prompt)
        return prompt

    def _check_content(self, name: str, value: Any) -> None:
        """Notes a prompt or a completion that is neither text nor messages."""
        remedy = "write a text, or a list of messages"
        if not isinstance(value, str | list):
            self.note(f"has a {type(value).__name__} as {name!r}", remedy)
        elif not value:
            self.note(f"has nothing as {name!r}", "leave it out")
        elif isinstance(value, str) and not _is_whole(value):
            problem = f"has half a character (a lone surrogate) in {name!r}"
            self.note(problem, "write whole characters")

    def sequences(
        self, prompt: Any, completions: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[int, list[Text | Conversation]]:
        """Joins prompt and completions; returns the messages of the prompt, too."""
        values = list(completions.values())
        is_text = isinstance(values[0], str)
        if not self.has_template:
            return 0, [*self._texts(prompt, values)]
        if is_text and prompt is None:
            remedy = "write the prompt, or prepare it with --tokenizer, without --chat"
            self.note("has texts without a prompt", remedy)
            return 0, []
        if is_text and isinstance(prompt, list):
            remedy = "write two texts, or two lists of messages"
            self.note("has a prompt and completions of different kinds", remedy)
            return 0, []
        if is_text:
            values = [[{"role": ANSWERS, "content": value}] for value in values]
        has_messages = isinstance(prompt, list)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not is_text and not has_messages:
            prompt, shared = _asked(prompt or [], values[0][: _num_shared(values)])
            values = [value[shared:] for value in values]
        if system := given.get("system"):
            prompt = [{"role": "system", "content": system}, *prompt]
        named = dict(zip(completions, values, strict=True))
        return len(prompt), self._conversations(prompt, named, given)

    def _texts(self, prompt: Any, values: list[Any]) -> list[Text]:
        """Joins texts, which are encoded without a template."""
        if isinstance(prompt, list) or not isinstance(values[0], str):
            remedy = "give the checkpoint of a chat template by --chat"
            self.note("has messages, which a template turns into text", remedy)
            return []
        if prompt is None:
            prompt, values = _split_prompt(values)
        return [Text(prompt, value) for value in values]

    def _conversations(
        self, prompt: list[Any], named: Mapping[str, Any], given: Mapping[str, Any]
    ) -> list[Text | Conversation]:
        """Makes a conversation of each completion; only completions have a loss."""
        beside = {name: given[name] for name in OPTIONAL if name in given}
        asked = [x | {"weight": 0} if isinstance(x, dict) else x for x in prompt]
        # Once for all completions, which would repeat the problems of the prompt.
        if asked and self._conversation(asked, beside, self.where) is None:
            return []
        found = [
            self._conversation([*asked, *value], beside, f"{name!r} of {self.where}")
            for name, value in named.items()
        ]
        return [talk for talk in found if talk is not None]

    def _conversation(
        self, messages: list[Any], beside: Mapping[str, Any], where: str
    ) -> Conversation | None:
        """Reads messages as a conversation; notes problems and returns None."""
        try:
            talk = read_conversation({"messages": messages, **beside}, self.path, where)
        except DataError as error:
            self.problems += error.problems
            return None
        return talk


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def _is_whole(text: str) -> bool:
    """Whether a text can be encoded: JSON can spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _num_shared(values: Sequence[list[Any]]) -> int:
    """Number of first messages that all completions share; each keeps one or more."""
    shared = 0
    for messages in zip(*(value[:-1] for value in values), strict=False):
        if any(message != messages[0] for message in messages):
            break
        shared += 1
    return shared


def _asked(prompt: list[Any], shared: Sequence[Any]) -> tuple[list[Any], int]:
    """Returns all messages of the prompt, and the number taken from `shared`.

    Example:
        >>> answer = {"role": "assistant", "content": "I look it up"}
        >>> _asked([{"role": "user", "content": "why?"}], [answer])
        ([{'role': 'user', 'content': 'why?'}], 0)
    """
    roles = [x.get("role") if isinstance(x, dict) else None for x in shared]
    number = int(roles[:1] == ["system"])
    # Some data sets repeat in `prompt` what the messages begin with.
    if not prompt or roles[number : number + 1] == ["user"]:
        return [*shared], len(shared)
    return [*shared[:number], *prompt], number


def _split_prompt(texts: Sequence[str]) -> tuple[str, list[str]]:
    r"""Splits texts into the words that all begin with, and what follows.

    Example:
        >>> _split_prompt(["Q: why?\nA: I know", "Q: why?\nA: I do not"])
        ('Q: why?\nA: I', [' know', ' do not'])
    """
    least, most = min(texts), max(texts)
    ends = (n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
    shared = least[: next(ends, len(least))]
    # Tokenizers join a space and the next word: the space belongs to the completion.
    spaces = [match.start() for match in re.finditer(r"\s+", shared)]
    end = spaces[-1] if spaces else 0
    return shared[:end], [text[end:] for text in texts]
