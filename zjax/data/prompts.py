"""Prompts of a run: texts, or conversations through the chat template of the data."""

import dataclasses
import functools
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.data import store
from zjax.data.chat import Chat, load_chat
from zjax.data.conversations import ANSWERS, Conversation, read_conversation
from zjax.data.source import open_documents, open_tokenizer
from zjax.data.tokenizer import Tokenizer, load_tokenizer
from zjax.data.tokenizer_files import TOKENIZER_NAME
from zjax.errors import ConfigError, Problem
from zjax.settings import schema

Given = (
    str
    | Conversation
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]]
    | Sequence[int]
    | np.ndarray
    | jax.Array
)
"""Text, conversation, record or list of messages, or ids, int[n], also of JAX."""
NUM_SEARCHED = 100
"""Conversations that are searched for a sample."""
_REMEDY = "name a checkpoint of this tokenizer that has one"


class Prompts:
    """Encodes prompts with one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, folder: str = "", *, has_answers: bool = False
    ):
        self.tokenizer, self._folder = tokenizer, folder
        self._has_answers = has_answers
        self._warned: set[str] = set()

    def encode(self, given: Given, *, special_tokens: bool = False) -> np.ndarray:
        """Encodes a prompt of any kind, int32[L]."""
        if isinstance(given, str):
            return self.encode_text(given, special_tokens=special_tokens)
        if is_ids(given):
            return read_ids(given)
        talk = given if isinstance(given, Conversation) else as_talk(given)
        return self.encode_talk(talk)

    def encode_text(self, text: str, *, special_tokens: bool = False) -> np.ndarray:
        """Encodes a text to continue; warns if a conversation may be meant."""
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            problem = "has half a character (a lone surrogate)"
            shown = describe_prompt(text)
            raise ConfigError(Problem("prompt", shown, problem, "remove it"))
        found = self.tokenizer.find_special_tokens(text)
        if found and not special_tokens:
            self._warn(
                f"a prompt spells {', '.join(found)} and is encoded as plain text; set "
                "special_tokens to encode the names as tokens, or give messages "
                "(--chat) for the chat template"
            )
        elif self._has_answers and not found:
            self._warn(
                "a prompt is plain text, but the run was trained on conversations; "
                "give messages (--chat) for the chat template"
            )
        return self.tokenizer.encode(text, special_tokens=special_tokens)

    def encode_talk(self, talk: Conversation) -> np.ndarray:
        """Encodes a conversation up to the start of the next answer."""
        if talk.messages[-1]["role"] == ANSWERS:
            problem = "ends with an answer"
            talk.refuse(problem, "end with the message that is to be answered")
        return self.chat.prompt_of(talk)

    @functools.cached_property
    def chat(self) -> Chat:
        """Chat template of `folder`, loaded on first use."""
        if not self._folder:
            name = self.tokenizer.name
            problem = f"has no chat template: the tokenizer of the data is {name!r}"
            raise ConfigError(Problem("chat", "", problem, _REMEDY))
        return load_chat(self._folder)

    def _warn(self, text: str) -> None:
        """Logs a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            logging.warning(text)


def make_prompts(data: schema.Data, vocab_size: int, chat: str = "") -> Prompts:
    """Makes the encoder of prompts for a model of some data.

    `chat` is the directory of a checkpoint with a chat template; empty for the template
    stored beside the tokens.
    """
    tokenizer = open_tokenizer(data, vocab_size)
    prepared = data.path if data.source == "tokens" else ""
    if chat:
        tokenizer = _with_ends_of(tokenizer, chat)
    return Prompts(tokenizer, chat or prepared, has_answers=has_conversations(data))


def _with_ends_of(tokenizer: Tokenizer, chat: str) -> Tokenizer:
    """Adds the end ids of a checkpoint: the template may end answers with these."""
    record = load_tokenizer(pathlib.Path(chat) / TOKENIZER_NAME).record
    if record.digest != tokenizer.record.digest:
        problem = f"has another tokenizer than the data, {tokenizer.name!r}"
        raise ConfigError(Problem("chat", chat, problem, _REMEDY))
    ends = tokenizer.record.with_ends(record.end_ids)
    return dataclasses.replace(tokenizer, record=ends)


def has_answers(data: schema.Data) -> bool:
    """Whether some data trains on answers to prompts."""
    return data.source == "tokens" and store.read_meta(data.path).has_answers


def has_conversations(data: schema.Data) -> bool:
    """Whether some data trains on the answers of conversations."""
    if not has_answers(data):
        return False
    return bool(store.read_meta(data.path).tokenizer.template_digest)


def is_ids(given: Any) -> bool:
    """Whether a prompt is numbers, which are to be token ids.

    Example:
        >>> is_ids([5, 6]), is_ids([{"role": "user", "content": "Why?"}])
        (True, False)
    """
    if isinstance(given, str | Conversation | Mapping):
        return False
    return _is_number(given) or all(map(_is_number, given))


def _is_number(given: Any) -> bool:
    """Whether a value is a number, or an array of any library."""
    return isinstance(given, numbers.Number) or hasattr(given, "dtype")


def read_ids(given: Any) -> np.ndarray:
    """Reads token ids, int[n], of a list or an array; refuses other numbers.

    Example:
        >>> read_ids([5, 6]).tolist()
        [5, 6]
    """
    ids = np.asarray(given)
    if ids.ndim != 1:
        problem = f"has {ids.ndim} dims, and ids have 1"
    elif ids.size and not np.issubdtype(ids.dtype, np.integer):
        problem = f"is of {ids.dtype}, and ids are integers"
    else:
        return ids
    remedy = "give a list of prompts, each a text or int[n]"
    raise ConfigError(Problem("prompt", describe_prompt(given), problem, remedy))


def as_talk(messages: Any) -> Conversation:
    """Reads messages, or a record with `messages`, `tools` and the like."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        messages = [*messages]  # a tuple is as good as a list
    record = messages if isinstance(messages, Mapping) else {"messages": messages}
    return read_conversation(record, "messages", "the conversation")


def describe_prompt(given: Any) -> str:
    """Names a prompt in messages by the first characters."""
    if isinstance(given, Conversation):
        given = str(given.messages[-1].get("content"))
    return str(given)[:20]


def find_question(data: schema.Data, vocab_size: int, most: int) -> np.ndarray | None:
    """Finds the prompt of a conversation of prepared data, as a sample.

    Held-out conversations are preferred. None if the first prompts are longer than
    `most` tokens.
    """
    splits = store.read_meta(data.path).splits
    split = "validation" if "validation" in splits else "train"
    talks = open_documents(data, split, vocab_size)
    assert talks.answers is not None
    starts = talks.offsets[:-1][:NUM_SEARCHED]
    for start, stop in zip(starts, talks.offsets[1:], strict=False):
        # The first answer token; 0 also without any answer.
        size = int(np.argmax(talks.answers[start:stop]))
        if 0 < size <= most:
            return np.asarray(talks.tokens[start : start + size], np.int32)
    return None
