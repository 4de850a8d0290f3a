"""The record of a tokenizer: which ids mean what, where texts begin and where they end.

`zjax data prepare` writes the record beside the tokens and a run into its checkpoints.
Starts from checkpoints, generation, evaluation and exports compare and read it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

KEY = "tokenizer"
"""Where `meta.json` and the `extra` of a checkpoint hold a record."""
MAX_VOCAB = 1 << 24
"""Largest vocabulary, also of a model."""


@dataclasses.dataclass(frozen=True)
class TokenizerRecord:
    """What tells one tokenizer from another, and where its texts begin and end.

    Args:
        name: `bytes`, `numbers`, `bpe:<vocab_size>`, or the path that a user gave.
        digest: 16 hexadecimal digits of the token of each id; empty for `numbers`,
            whose ids mean what the data makes of them.
        vocab_size: Largest id plus 1.
        bos_id: Id with which each text begins, or None if texts begin without one.
        end_ids: Ids that end a text. The first ends each document in training;
            generation stops at any of them.
        template_digest: 16 hexadecimal digits of the chat template; empty for none.

    Example:
        >>> record = TokenizerRecord("numbers", "", 100, None, (99,))
        >>> TokenizerRecord.from_mapping(record.to_mapping()) == record
        True
    """

    name: str
    digest: str
    vocab_size: int
    bos_id: int | None
    end_ids: tuple[int, ...]
    template_digest: str = ""

    def with_ends(self, end_ids: Sequence[int]) -> "TokenizerRecord":
        """Adds ids that end a text, such as those that ended answers in training.

        Args:
            end_ids: The ids.

        Example:
            >>> TokenizerRecord("numbers", "", 9, None, (8,)).with_ends([7, 8]).end_ids
            (8, 7)
        """
        ends = tuple(dict.fromkeys((*self.end_ids, *end_ids)))
        return dataclasses.replace(self, end_ids=ends)

    def config_ids(self) -> dict[str, Any]:
        """Gives the ids that begin and end texts, as JSON files of checkpoints do.

        Example:
            >>> TokenizerRecord("numbers", "", 9, None, (8,)).config_ids()
            {'eos_token_id': 8}
        """
        ids: dict[str, Any] = {}
        if self.bos_id is not None:
            ids["bos_token_id"] = self.bos_id
        if ends := [*self.end_ids]:
            ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        return ids

    def to_mapping(self) -> dict[str, Any]:
        """Gives the fields as JSON values."""
        return dataclasses.asdict(self) | {"end_ids": [*self.end_ids]}

    @classmethod
    def from_mapping(cls, values: Any) -> "TokenizerRecord":
        """Reads the fields from JSON values.

        Args:
            values: Result of `to_mapping`, from a file that may be damaged.

        Raises:
            ValueError: A field is missing, unknown, of another type or out of range.
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
    """Says whether a JSON value is a token id.

    Args:
        value: Any JSON value.
        vocab_size: Number above all ids.

    Example:
        >>> is_id(3, 4), is_id(4, 4), is_id(True, 4)
        (True, False, False)
    """
    return type(value) is int and 0 <= value < vocab_size


def digest_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """Hashes the token of each id.

    Args:
        vocabulary: Ids by token.

    Returns:
        16 hexadecimal digits, which do not depend on the order of the tokens or on the
        format of their file.

    Example:
        >>> one, other = {"a": 0, "b": 1}, {"b": 1, "a": 0}
        >>> digest_vocabulary(one) == digest_vocabulary(other)
        True
        >>> digest_vocabulary(one) == digest_vocabulary({"a": 1, "b": 0})
        False
    """
    return digest_of(sorted((id_, token) for token, id_ in vocabulary.items()))


def digest_of(content: Any) -> str:
    """Hashes JSON values; gives 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
