"""Encodes conversations by a chat template, and finds which tokens are answers.

A template is a Jinja program in `chat_template.jinja` or `tokenizer_config.json`, which
runs in a process with limits. An answer is the text that a turn adds to the prompt,
which is the rendered conversation before the turn; the end of turn belongs to the
answer. Answers share a text if the template only appends turns. A template that
rewrites earlier turns gives a text for each answer.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from zjax.data import tokenizer as text
from zjax.data.conversations import ANSWERS, Conversation
from zjax.data.template_process import (
    Rendered,
    Request,
    TemplateError,
    TemplateProcess,
)
from zjax.data.template_worker import CLOSE, OPEN
from zjax.data.tokenizer_files import DEFAULT, TOKENIZER_NAME, TOOLS, TokenizerFiles
from zjax.errors import DataError, Problem, check_installed

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

_MAX_SHOWN = 100
"""Maximum number of characters of a prompt in a message."""

Spans = list[tuple[int, int]]
Prefix = tuple[int, bool]
"""Number of messages of a text, and whether the prompt for an answer follows."""


class Encoded(NamedTuple):
    """A conversation as token ids.

    Args:
        samples: Pairs of ids, int32[n], and answer flags, uint8[n]; several pairs if
            the template rewrites earlier answers. Text behind the last answer is left
            out.
        ends: Id of the special token that ends each answer with a loss; None for an
            answer that ends without a special token.
    """

    samples: list[tuple[np.ndarray, np.ndarray]]
    ends: list[int | None]


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template, with the tokenizer of the checkpoint.

    Args:
        is_marked: Whether the template marks answers, with the tag `generation`.
        encode: Function `encode(text) -> (ids, first character of each token)`.
        special_tokens: Ids of special tokens by name.
        marker: Marker of the user's turn, if nothing else ends an answer; empty for
            other templates.
    """

    folder: str
    is_marked: bool
    templates: "Templates"
    encode: Callable[[str], tuple[np.ndarray, np.ndarray]]
    special_tokens: Mapping[str, int]
    marker: str = ""

    def render(self, talk: Conversation, number: int, asks: bool) -> str:
        """Renders the first `number` messages, then the answer's prompt if `asks`."""
        prefixes = [(number, asks)]
        [rendered] = self.templates.render_each([talk], lambda _: prefixes)
        return self.templates.texts_of(talk, prefixes, rendered)[number, asks]

    def render_each(self, talks: Iterable[Conversation]) -> Iterator[Rendered]:
        """Renders the texts that `samples_of` needs of each conversation, in order."""
        return self.templates.render_each(talks, _prefixes_of)

    def text_of(self, talk: Conversation, *, asks: bool) -> str:
        """Renders a whole conversation, then the prompt for an answer if `asks`."""
        return _take_marks(self.render(talk, len(talk.messages), asks))[0]

    def prompt_of(self, talk: Conversation) -> np.ndarray:
        """Encodes a conversation and the prompt for the next answer, int32[n]."""
        return self._encode(talk, self.text_of(talk, asks=True), [])[0]

    def samples_of(self, talk: Conversation, rendered: Rendered) -> Encoded:
        """Encodes a conversation from the texts of `render_each`."""
        if ANSWERS not in (message["role"] for message in talk.messages):
            roles = ", ".join(dict.fromkeys(each["role"] for each in talk.messages))
            problem = f"has no message of the role {ANSWERS!r}, only of {roles},"
            talk.refuse(problem, "give it an answer, or leave it out")
        contents = "".join(str(message.get("content")) for message in talk.messages)
        # Marks within a content could pass any text off as an answer.
        if self.is_marked and {OPEN, CLOSE} & set(contents):
            talk.refuse(
                "has U+FDD0 or U+FDD1, which are no characters,", "leave them out"
            )
        texts = self.templates.texts_of(talk, _prefixes_of(talk), rendered)
        samples: list[tuple[str, Spans]] = []
        ends: list[int | None] = []
        # From the last answer: a longer text takes in the answers of all texts that
        # begin it.
        for number in reversed(np.flatnonzero(talk.trained).tolist()):
            prompt, whole = texts[number, True], texts[number + 1, False]
            whole, spans = self._answer(talk, number, prompt, whole)
            # After tool calls comes the tool's turn, not the user's marker.
            if self.marker and not talk.messages[number].get("tool_calls"):
                [(begin, end)], whole = spans, whole + self.marker
                spans = [(begin, end + len(self.marker))]
            ends.append(_find_end(whole[slice(*spans[-1])], self.special_tokens))
            for longer, others in samples:
                if longer.startswith(whole):
                    others += spans
                    break
            else:
                samples.append((whole, spans))
        # Back in the order of the conversation.
        encoded = [self._encode(talk, *sample) for sample in reversed(samples)]
        if not any(answers.any() for _, answers in encoded):
            talk.refuse("has no token of an answer with a loss", "leave it out")
        return Encoded(encoded, ends)

    def _answer(
        self, talk: Conversation, number: int, prompt: str, whole: str
    ) -> tuple[str, Spans]:
        """Finds the text up to the end of an answer, and the spans with a loss."""
        if self.is_marked:
            (prompt, _), (whole, marks) = _take_marks(prompt), _take_marks(whole)
            shared = _shared_part(prompt, whole)
            # Marks of earlier answers end within the prompt.
            spans = [(first, end) for first, end in marks if end > shared]
            if not spans:
                problem = (
                    f"has an answer, message {number + 1}, that the chat template "
                )
                problem += f"of {self.folder} does not mark,"
                talk.refuse(problem, "correct the template, or give it weight 0")
            return whole, spans
        # The template cut the start of the answer that the prompt holds.
        if not whole.startswith(prompt):
            whole = self._continue(talk, number, prompt, whole)
        return whole, [(len(prompt), len(whole))]

    def _continue(
        self, talk: Conversation, number: int, prompt: str, whole: str
    ) -> str:
        """Text of the prompt that begins an answer, continued by the given answer.

        The template puts the start of the answer, such as the start of a thought, into
        the prompt, and cuts that start from answers. The content is taken as the user
        wrote it; the template adds the end of turn.
        """
        content = talk.messages[number].get("content") or ""
        shared = _shared_part(prompt, whole)
        # Tries how many characters of the content the prompt already holds.
        for size in range(len(prompt) - shared, min(len(prompt), len(content)) + 1):
            is_begun = prompt.endswith(content[:size])
            if is_begun and whole.startswith(prompt[: len(prompt) - size]):
                turn = whole[len(prompt) - size :]
                if seen := _seen_part(content, turn):
                    return prompt + content[size:] + turn[seen:]
        begun = prompt[shared:][:_MAX_SHOWN]
        problem = f"has an answer, message {number + 1}, that does not begin with "
        problem += f"{begun!r} as the prompt in the chat template of "
        problem += f"{self.folder} does,"
        talk.refuse(problem, "write this into its content, or give it weight 0")

    def _encode(
        self, talk: Conversation, whole: str, spans: Spans
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text, and flags the tokens within spans."""
        try:
            # Finds lone surrogates, which JSON can spell and no tokenizer can encode.
            whole.encode()
        except UnicodeEncodeError:
            problem = "has half a character (a lone surrogate)"
            talk.refuse(problem, "write whole characters")
        ids, starts = self.encode(whole)
        answers = np.zeros(len(ids), np.uint8)
        for begin, end in spans:
            # A token belongs to the span of the first character.
            answers |= (begin <= starts) & (starts < end)
        return ids, answers


def _find_end(text: str, special_tokens: Mapping[str, int]) -> int | None:
    """Id of the special token at the end of a text, ignoring spaces, or None."""
    text = text.rstrip()
    return special_tokens.get(
        # The longest, as the name of one token may end with the name of another.
        max(filter(text.endswith, special_tokens), key=len, default="")
    )


def _find_marker(chat: Chat, end_ids: Sequence[int]) -> str:
    """Finds the marker of the user's turn, if the template ends answers with it alone.

    The checkpoint stops generation at this marker, as GLM does at `<|user|>`: the
    marker then is the end of an answer, and has a loss.
    """
    # A probe: the text between an answer and the next user turn shows the marker.
    roles = ("user", ANSWERS, "user")
    messages = [{"role": role, "content": "?"} for role in roles]
    talk = Conversation(messages, [False, True, False], None, {}, chat.folder, "")
    try:
        whole, longer = (chat.render(talk, number, False) for number in (2, 3))
    except DataError:  # the template takes no such conversation
        return ""
    if chat.is_marked or _find_end(whole, chat.special_tokens) is not None:
        return ""
    following = longer.removeprefix(whole) if longer.startswith(whole) else ""
    markers = (x for x, number in chat.special_tokens.items() if number in end_ids)
    return next(filter(following.startswith, markers), "")


def _shared_part(one: str, other: str) -> int:
    """Length in characters of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    ends = (n for n, (mine, its) in pairs if mine != its)
    return next(ends, min(len(one), len(other)))


def _seen_part(content: str, turn: str) -> int:
    """Length in characters of the longest end of `content` that begins `turn`."""
    # Templates often strip trailing white space.
    for kept in dict.fromkeys((content, content.rstrip())):
        for first in range(max(0, len(kept) - len(turn)), len(kept)):
            # turn[0] first: slicing at every position would be quadratic.
            if kept[first] == turn[0] and turn.startswith(kept[first:]):
                return len(kept) - first
    return 0


def _take_marks(rendered: str) -> tuple[str, Spans]:
    """Splits a text into the unmarked text and the spans within marks.

    Example:
        >>> _take_marks(f"ask {OPEN}answer{CLOSE} end")
        ('ask answer end', [(4, 10)])
    """
    pieces = re.split(f"[{OPEN}{CLOSE}]", rendered)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    # Not strict: behind the last piece there is no mark.
    return "".join(pieces), list(zip(ends[0::2], ends[1::2], strict=False))


def load_chat(folder: str) -> Chat:
    """Reads the template and the tokenizer of a Hugging Face checkpoint.

    The template is in `tokenizer_config.json` or `chat_template.jinja`.
    """
    check_installed("jinja2")
    path = pathlib.Path(folder) / TOKENIZER_NAME
    library, files = text.load_library(path), TokenizerFiles(path)
    sources = files.templates()
    if not sources:
        raise DataError(_problem(folder, "has no chat template"))

    def encode(whole: str) -> tuple[np.ndarray, np.ndarray]:
        # The template has written BOS already.
        encoding = library.encode(whole, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return np.array(encoding.ids, np.int32), np.array(starts, np.int64)

    is_marked = any(map(_GENERATION.search, sources.values()))
    made = Chat(
        folder,
        is_marked,
        Templates(folder, sources, files.special_tokens()),
        encode,
        text.special_tokens_of(library),
    )
    end_ids = text.make_library_record(library, path).end_ids
    return dataclasses.replace(made, marker=_find_marker(made, end_ids))


class Templates:
    """Compiled templates of a checkpoint, with the special tokens of the tokenizer.

    Raises:
        DataError: A template cannot be compiled.
    """

    def __init__(
        self, folder: str, sources: Mapping[str, str], special: Mapping[str, str]
    ):
        self._folder, self._sources, self._special = folder, sources, special
        self._told: set[str] = set()
        try:
            self._process = TemplateProcess(sources)
        except TemplateError as error:
            problem = f"has a chat template that cannot be read ({error})"
            raise DataError(_problem(folder, problem)) from error

    def render_each(
        self,
        talks: Iterable[Conversation],
        prefixes_of: Callable[[Conversation], Sequence[Prefix]],
    ) -> Iterator[Rendered]:
        """Renders the prefixes of each conversation, in order."""
        return self._process.render_each(
            Request(
                self._name_of(talk),
                # As in transformers, templates find both names even without a value.
                {"tools": talk.tools, "documents": None}
                # Options of the record win over special tokens.
                | {**self._special, **talk.options},
                talk.messages,
                prefixes_of(talk),
            )
            for talk in talks
        )

    def texts_of(
        self, talk: Conversation, prefixes: Sequence[Prefix], rendered: Rendered
    ) -> dict[Prefix, str]:
        """Texts of a conversation by prefix; raises if the template did not render."""
        source = self._sources[self._name_of(talk)]
        keys = {key for message in talk.messages for key in message} - self._told
        if new := sorted(key for key in keys if key not in source):
            self._told.update(new)
            shown = ", ".join(new)
            logging.warning(
                "%s has a chat template that reads no %s", self._folder, shown
            )
        if talk.tools and "tools" not in source:
            problem = "has tools, which the chat template of "
            problem += f"{self._folder} does not write,"
            talk.refuse(problem, "leave them out, or give another template")
        if rendered.refusal is not None:
            problem = "has a conversation that the chat template of "
            problem += f"{self._folder} refuses ({rendered.refusal})"
            talk.refuse(problem, "correct it, or leave it out")
        if rendered.error is not None:
            problem = "has a conversation on which the chat template of "
            problem += f"{self._folder} fails ({rendered.error})"
            talk.refuse(problem, "correct it, or the template, or leave it out")
        return dict(zip(prefixes, rendered.texts, strict=True))

    def _name_of(self, talk: Conversation) -> str:
        return TOOLS if talk.tools and TOOLS in self._sources else DEFAULT


def _prefixes_of(talk: Conversation) -> list[Prefix]:
    """Lists for each answer with a loss the prompt, and the text up to the end."""
    numbers = np.flatnonzero(talk.trained).tolist()
    return [pair for n in numbers for pair in ((n, True), (n + 1, False))]


def _problem(folder: str, problem: str) -> Problem:
    remedy = "give the directory of a checkpoint with a chat template"
    return Problem("chat", folder, problem, remedy)
