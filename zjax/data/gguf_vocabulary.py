"""Vocabularies of llama.cpp, made of the files of a Hugging Face tokenizer."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zjax.data.tokenizer_files import (
    DEFAULT,
    MAX_FILE_BYTES,
    TOKENIZER_NAME,
    TokenizerFiles,
    TokenizerRecord,
)
from zjax.errors import DataError, Problem
from zjax.files import parse_json, read_text

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens in llama.cpp."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    _LLAMA3: "llama-bpe",
    _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}
"""Names of llama.cpp for regular expressions that split texts into words."""
_SPACE = "\u2581"
"""Character that stands for a space in tokens of SentencePiece."""


def vocabulary_of(
    folder: pathlib.Path, record: TokenizerRecord, vocab_size: int
) -> dict[str, Any]:
    """Makes the metadata `tokenizer.*` of a GGUF file.

    Args:
        folder: Directory with a `tokenizer.json` and the files beside it.
        record: Ids that begin and end texts.
        vocab_size: Rows of the table of the model; rows without a token are unused.

    Returns:
        Metadata by name: model, tokens, types, merges or scores, ids, chat template.

    Raises:
        DataError: llama.cpp has no tokenizer that splits texts this way.
    """
    path = folder / TOKENIZER_NAME
    content = parse_json(read_text(path, MAX_FILE_BYTES))
    model = content.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise _unknown(path, f"is a {model.get('type')}, and llama.cpp has BPE here")
    tokens = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(tokens, _NORMAL)
    for added in content.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added.get("special") else _USER
    pairs = [x.split(" ", 1) if isinstance(x, str) else x for x in model["merges"]]
    if model.get("byte_fallback"):
        found = _sentencepiece(content, tokens, types, pairs)
    else:
        found = _byte_pairs(content, path, tokens, pairs)
    rows = range(max(vocab_size, 1 + max(tokens)))
    found["tokenizer.ggml.tokens"] = [tokens.get(x, f"[PAD{x}]") for x in rows]
    found["tokenizer.ggml.token_type"] = [types.get(x, _UNUSED) for x in rows]
    if "tokenizer.ggml.scores" in found:
        scores = found["tokenizer.ggml.scores"]
        found["tokenizer.ggml.scores"] = [scores.get(x, 0.0) for x in rows]
    templates = TokenizerFiles(path).templates()
    if DEFAULT in templates:
        found["tokenizer.chat_template"] = templates[DEFAULT]
    return found | _ids(record)


def _ids(record: TokenizerRecord) -> dict[str, Any]:
    """Metadata of the ids that begin and end texts."""
    found: dict[str, Any] = {"tokenizer.ggml.add_bos_token": record.bos_id is not None}
    if record.bos_id is not None:
        found["tokenizer.ggml.bos_token_id"] = record.bos_id
    # llama.cpp stops at the end of a text and at the end of a turn.
    names = "eos_token_id", "eot_token_id"
    for name, number in zip(names, record.end_ids, strict=False):
        found[f"tokenizer.ggml.{name}"] = number
    return found


def _byte_pairs(
    content: Mapping[str, Any],
    path: pathlib.Path,
    tokens: Mapping[int, str],
    pairs: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Metadata of a BPE of bytes."""
    # llama.cpp wants a merge; tokens of no pair are looked up byte by byte.
    pairs = pairs or [(tokens[min(tokens)],) * 2]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(content, path),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
    }


def _splitting(content: Mapping[str, Any], path: pathlib.Path) -> str:
    """Name of llama.cpp for the splitting of texts into words."""
    given = content.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers") or [given]
    kinds = [x.get("type") for x in steps]
    last = steps[-1]
    if kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        names = " and ".join(map(str, kinds))
        raise _unknown(path, f"splits texts by {names}, which llama.cpp does not")
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = (steps[0].get("pattern") or {}).get("Regex")
    if kinds == ["Split", "ByteLevel"] and pattern in PATTERNS:
        return PATTERNS[pattern]
    raise _unknown(path, f"splits texts by {pattern!r}, which llama.cpp does not")


def _sentencepiece(
    content: Mapping[str, Any],
    tokens: Mapping[int, str],
    types: dict[int, int],
    pairs: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Metadata of a BPE of characters, whose unknown characters are bytes."""
    ids = {text: number for number, text in tokens.items()}
    for number, text in tokens.items():
        if len(text) == 6 and text.startswith("<0x"):  # <0x0A>
            types[number] = _BYTE
    unknown = ids.get(content["model"].get("unk_token") or "")
    if unknown is not None:
        types[unknown] = _UNKNOWN
    # llama.cpp merges the pair whose token has the highest score.
    scores = dict[int, float]()
    for rank, pair in enumerate(pairs):
        if (number := ids.get("".join(pair))) is not None:
            scores.setdefault(number, -float(rank))
    steps = [content.get(x) or {} for x in ("normalizer", "pre_tokenizer")]
    steps += [x for step in steps for x in step.get("normalizers") or ()]
    prepends = any(
        x.get("prepend") == _SPACE or x.get("prepend_scheme") in ("first", "always")
        for x in steps
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prepends,
    }


def _unknown(path: pathlib.Path, problem: str) -> DataError:
    remedy = "use --format=hf"
    return DataError(Problem("tokenizer", str(path), problem, remedy))
