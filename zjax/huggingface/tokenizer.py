"""Files of a tokenizer, which go from a Hugging Face checkpoint to an export of it."""

import pathlib
import shutil
from typing import Any

from zjax.errors import CheckpointError, Problem
from zjax.huggingface.settings import CONFIG_NAME, read_config

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model",),
    *("chat_template.jinja", "generation_config.json"),
)
"""Files that go along, if they are there."""
MAX_BYTES = 1 << 28
"""Most bytes of one of them."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Copies the files of a tokenizer; returns their names.

    Args:
        source: Directory of a Hugging Face checkpoint.
        folder: Directory of the export.

    Raises:
        CheckpointError: A file is too large, or no file.

    Example:
        >>> copy_tokenizer(pathlib.Path("missing"), pathlib.Path("."))
        []
    """
    found = [name for name in FILES if (source / name).exists()]
    problems = []
    for name in found:
        path = source / name
        if not path.is_file():
            problem, remedy = "is not a file", "move it away"
            problems.append(Problem("tokenizer", str(path), problem, remedy))
        elif path.stat().st_size > MAX_BYTES:
            problem = f"has more than {MAX_BYTES:,} bytes"
            problems.append(Problem("tokenizer", str(path), problem, "move it away"))
    if problems:
        raise CheckpointError(*problems)
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


def token_ids(source: pathlib.Path) -> dict[str, Any]:
    """The ids that begin, end and pad a text, of the checkpoint's config.json.

    Example:
        >>> token_ids(pathlib.Path("missing"))
        {}
    """
    if not (source / CONFIG_NAME).is_file():
        return {}
    values = read_config(source / CONFIG_NAME)
    return {name: values[name] for name in _IDS if name in values}
