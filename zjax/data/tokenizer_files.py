"""Files of a tokenizer, and the record that identifies a tokenizer."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from zjax.errors import DataError, Problem
from zjax.files import parse_json, read_text

KEY = "tokenizer"
"""Key of a record in `meta.json` and in the `extra` of a checkpoint."""
MAX_VOCAB = 1 << 24
"""Maximum vocabulary size of a tokenizer or a model."""


@dataclasses.dataclass(frozen=True)
class TokenizerRecord:
    """Identity of a tokenizer, with the ids that begin and end texts.

    Args:
        name: Name `bytes`, `numbers`, `bpe:<vocab_size>`, or the path that a user gave.
        digest: Hash of the token of each id, 16 hexadecimal digits; empty for
            `numbers`, as the data alone gives ids a meaning.
        bos_id: Id with which each text begins, or None if texts begin without BOS.
        end_ids: Ids that end a text. The first ends each document in training;
            generation stops at any end id.
        template_digest: Hash of the chat template, 16 hexadecimal digits; empty without
            a template.
    """

    name: str
    digest: str
    vocab_size: int
    bos_id: int | None
    end_ids: tuple[int, ...]
    template_digest: str = ""

    def with_ends(self, end_ids: Sequence[int]) -> "TokenizerRecord":
        """Adds ids that end a text, such as ids that ended answers in training.

        Example:
            >>> TokenizerRecord("numbers", "", 9, None, (8,)).with_ends([7, 8]).end_ids
            (8, 7)
        """
        # dict.fromkeys keeps the order: the first id ends documents.
        ends = tuple(dict.fromkeys((*self.end_ids, *end_ids)))
        return dataclasses.replace(self, end_ids=ends)

    def config_ids(self) -> dict[str, Any]:
        """Ids that begin and end texts, by key as in JSON files of checkpoints."""
        ids: dict[str, Any] = {}
        if self.bos_id is not None:
            ids["bos_token_id"] = self.bos_id
        if ends := [*self.end_ids]:
            ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        return ids

    def to_mapping(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return dataclasses.asdict(self) | {"end_ids": [*self.end_ids]}

    @classmethod
    def from_mapping(cls, values: Any) -> "TokenizerRecord":
        """Reads the fields from JSON values, which may be damaged.

        Raises ValueError if a field is missing, unknown, of another type or out of
        range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"a tokenizer record has the fields {sorted(names)}")
        texts = (values["name"], values["digest"], values["template_digest"])
        size, bos, ends = (values[n] for n in ("vocab_size", "bos_id", "end_ids"))
        is_valid = (
            all(isinstance(text, str) for text in texts)
            and type(size) is int
            and 0 < size <= MAX_VOCAB
            and isinstance(ends, list)
            and all(is_id(each, size) for each in ends)
            and (bos is None or is_id(bos, size))
        )
        if not is_valid:
            raise ValueError("a field of the tokenizer record is out of range")
        fields: dict[str, Any] = values | {"end_ids": tuple(ends)}
        return cls(**fields)


def is_id(value: Any, vocab_size: int) -> bool:
    """Whether a JSON value is a token id.

    Example:
        >>> is_id(3, 4), is_id(4, 4), is_id(True, 4)
        (True, False, False)
    """
    # By type, as True is an int, too.
    return type(value) is int and 0 <= value < vocab_size


def digest_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """Hashes the token of each id, in any order of the vocabulary.

    Example:
        >>> one, other = {"a": 0, "b": 1}, {"b": 1, "a": 0}
        >>> digest_vocabulary(one) == digest_vocabulary(other)
        True
        >>> digest_vocabulary(one) == digest_vocabulary({"a": 1, "b": 0})
        False
    """
    return digest_of(sorted((id_, token) for token, id_ in vocabulary.items()))


def digest_of(content: Any) -> str:
    """Hashes JSON values; returns 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


TOKENIZER_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_NAME, GENERATION_NAME = "chat_template.jinja", "generation_config.json"
SPECIAL_NAME, MODEL_NAME = "special_tokens_map.json", "config.json"
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"
DEFAULT, TOOLS = "default", "tool_use"
"""Names of chat templates in a checkpoint with several templates."""
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>")
"""Names of the end-of-document token, first match wins, for a tokenizer without a
config that names an end token."""
RUN_FOLDER = "tokenizer"
"""Folder beside the checkpoints of a run with the files of its tokenizer."""
FILES = (
    *(TOKENIZER_NAME, CONFIG_NAME, SPECIAL_NAME, TEMPLATE_NAME, GENERATION_NAME),
    TOOL_TEMPLATE_NAME,
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
MAX_FILE_BYTES = 1 << 29
"""Maximum size in bytes of a file of a tokenizer."""
_MAX_CONFIG_BYTES = 1 << 26
"""Maximum size in bytes of a JSON file beside a `tokenizer.json`, which may hold chat
templates."""
_REMEDY = "correct it, or give the tokenizer files of a checkpoint"


def make_record(
    path: pathlib.Path, name: str, vocabulary: Mapping[str, int], prefix: Sequence[int]
) -> TokenizerRecord:
    """Makes the record of a `tokenizer.json` from the files beside it.

    The first end id is the `eos_token` of `tokenizer_config.json`. The ids of
    `generation_config.json` follow, or of `config.json` without a generation config.
    `add_bos_token` decides whether texts begin with BOS; without this key, the
    post-processor decides by the `prefix` that it writes.
    """
    files = TokenizerFiles(path)
    ends = [*files.end_tokens(vocabulary), *files.generation_end_ids()]
    if not ends:
        ends = [vocabulary[token] for token in END_TOKENS if token in vocabulary][:1]
    vocab_size = max(vocabulary.values(), default=0) + 1
    if vocab_size > MAX_VOCAB:
        problem = f"has token id {vocab_size - 1}"
        raise DataError(
            Problem("tokenizer", name, problem, f"use ids below {MAX_VOCAB}")
        )
    if beyond := [each for each in ends if each >= vocab_size]:
        text = "tokenizer=%r: end ids %s of %s are beyond its vocabulary of %s"
        logging.warning(text, name, beyond, GENERATION_NAME, f"{vocab_size:,}")
    templates = files.templates()
    return TokenizerRecord(
        name,
        digest_vocabulary(vocabulary),
        vocab_size,
        files.bos_id(vocabulary, prefix),
        tuple(dict.fromkeys(each for each in ends if each < vocab_size)),
        digest_of(templates) if templates else "",
    )


class TokenizerFiles:
    """JSON files and chat templates beside a `tokenizer.json`.

    Args:
        path: Path of the `tokenizer.json`. Under another name it stands alone.

    Raises:
        DataError: A file cannot be read, or is not a JSON object.
    """

    def __init__(self, path: pathlib.Path):
        self.folder = path.parent
        self._is_alone = path.name != TOKENIZER_NAME
        # `tokenizer_config.json` wins over the older `special_tokens_map.json`.
        self.config = self._read(SPECIAL_NAME) | self._read(CONFIG_NAME)
        self.generation = self._read(GENERATION_NAME)

    def special_tokens(self) -> dict[str, str]:
        """Special tokens by key, such as `eos_token`."""
        return {
            name: text
            for name, value in self.config.items()
            if name.endswith("_token") and isinstance(text := _content_of(value), str)
        }

    def end_tokens(self, vocabulary: Mapping[str, int]) -> list[int]:
        """Id of `eos_token` in a list, which is empty without such a token."""
        token = self.special_tokens().get("eos_token")
        if token is None:
            return []
        if token not in vocabulary:
            text = "tokenizer=%r has eos_token=%r, which its vocabulary lacks"
            logging.warning(text, str(self.folder), token)
            return []
        return [vocabulary[token]]

    def generation_end_ids(self) -> list[int]:
        """Ids at which the checkpoint stops generation."""
        name = GENERATION_NAME if self.generation else MODEL_NAME
        given = self._read(name).get("eos_token_id")
        if given is None:
            return []
        ids = given if isinstance(given, list) else [given]
        if not all(is_id(each, MAX_VOCAB) for each in ids):
            problem = f"has eos_token_id={given!r}, which is no id and no list of ids"
            raise DataError(self._problem(name, problem))
        return ids

    def bos_id(
        self, vocabulary: Mapping[str, int], prefix: Sequence[int]
    ) -> int | None:
        """Id with which texts begin, or None."""
        adds_bos = self.config.get("add_bos_token")
        if adds_bos is None:
            if len(prefix) > 1:
                text = (
                    "tokenizer=%r begins texts with %d tokens, of which zjax writes one"
                )
                logging.warning(text, str(self.folder), len(prefix))
            return prefix[0] if prefix else None
        if not adds_bos:
            return None
        token = self.special_tokens().get("bos_token")
        if token is None or token not in vocabulary:
            problem = f"has add_bos_token, but the vocabulary lacks bos_token={token!r}"
            raise DataError(self._problem(CONFIG_NAME, problem))
        return vocabulary[token]

    def templates(self) -> dict[str, str]:
        """Chat templates by name, `default` first; empty without a default.

        A `chat_template.jinja`, with the `tool_use.jinja` in a folder beside it,
        replaces the templates of `tokenizer_config.json`.
        """
        given = self.config.get("chat_template")
        found: dict[str, Any] = {DEFAULT: given}
        if isinstance(given, list):
            pairs = (each for each in given if isinstance(each, dict))
            found = {str(each.get("name")): each.get("template") for each in pairs}
        if (default := self._read_template(TEMPLATE_NAME)) is not None:
            tools = self._read_template(TOOL_TEMPLATE_NAME)
            found = {DEFAULT: default, TOOLS: tools}
        named = {x: found[x] for x in (DEFAULT, TOOLS) if isinstance(found.get(x), str)}
        return named if DEFAULT in named else {}

    def _read_template(self, name: str) -> str | None:
        """Reads the file of a chat template; None if missing."""
        path = self.folder / name
        if self._is_alone or not path.is_file():
            return None
        try:
            return read_text(path, _MAX_CONFIG_BYTES)
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
            raise DataError(self._problem(name, problem)) from error

    def _read(self, name: str) -> dict[str, Any]:
        """Reads a JSON object; a missing file gives an empty object."""
        path = self.folder / name
        if self._is_alone or not path.exists():
            return {}
        try:
            content = parse_json(read_text(path, _MAX_CONFIG_BYTES))
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
            raise DataError(self._problem(name, problem)) from error
        if not isinstance(content, dict):
            raise DataError(self._problem(name, "is not a JSON object"))
        return content

    def _problem(self, name: str, problem: str) -> Problem:
        """Makes a problem that names one of the files."""
        return Problem("tokenizer", str(self.folder / name), problem, _REMEDY)


def _content_of(value: Any) -> Any:
    """Text of a special token, which may be an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def copy_files(path: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Copies a `tokenizer.json` and the files of a tokenizer beside it.

    A file of another name is copied alone, as `tokenizer.json`. Returns the names.
    """
    found = {name: path.parent / name for name in FILES}
    if path.name != TOKENIZER_NAME:
        found = {TOKENIZER_NAME: path}
    found = {name: file for name, file in found.items() if file.exists()}
    problems = []
    for file in found.values():
        problem = "" if file.is_file() else "is not a file"
        if not problem and file.stat().st_size > MAX_FILE_BYTES:
            problem = f"has more than {MAX_FILE_BYTES:,} bytes"
        if problem:
            problems.append(Problem("tokenizer", str(file), problem, "move it away"))
    if problems:
        raise DataError(*problems)
    for name, file in found.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    return [*found]


def write_files(
    folder: pathlib.Path, library_text: str, special: Mapping[str, str]
) -> None:
    """Writes the files of a tokenizer that zjax made."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / TOKENIZER_NAME).write_text(library_text, encoding="utf-8")
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def write_ends(folder: pathlib.Path, record: TokenizerRecord) -> None:
    """Writes the end ids of a record into `generation_config.json`.

    Other values of the file stay.
    """
    values = TokenizerFiles(folder / TOKENIZER_NAME).generation
    values = values | record.config_ids()
    (folder / GENERATION_NAME).write_text(json.dumps(values, indent=2) + "\n")
