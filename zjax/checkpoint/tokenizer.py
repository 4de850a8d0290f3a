"""Tokenizers of checkpoints: compared with data at a start, written by an export."""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from zjax.checkpoint.start import find_config
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.data import tokenizer as text
from zjax.data.source import read_record
from zjax.data.taught import is_stored
from zjax.data.tokenizer_files import (
    KEY,
    RUN_FOLDER,
    TOKENIZER_NAME,
    TokenizerRecord,
    copy_files,
    write_ends,
)
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.files import local_path, writing
from zjax.settings import schema
from zjax.weights.config_json import CONFIG_NAME, read_config

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WITHOUT_FILES = ("bytes", "numbers")
"""Names of built-in tokenizers, which no Hugging Face checkpoint has."""


@dataclasses.dataclass(frozen=True)
class CheckpointTokenizer:
    """Tokenizer that belongs to the weights of a checkpoint."""

    record: TokenizerRecord | None
    path: pathlib.Path


def tokenizer_of_run(store: Store, step: int | None = None) -> CheckpointTokenizer:
    """Reads the tokenizer of a run's data from a checkpoint of the run."""
    saved = store.extra(step).get(KEY)
    try:
        record = None if saved is None else TokenizerRecord.from_mapping(saved)
    except ValueError as error:
        remedy = "take another checkpoint of the run"
        problem = Problem("step", step, f"has a broken record ({error})", remedy)
        raise CheckpointError(problem) from error
    return CheckpointTokenizer(record, store.directory / RUN_FOLDER / TOKENIZER_NAME)


def tokenizer_of_start(field: str, start: str) -> CheckpointTokenizer:
    """Reads the tokenizer beside weights from which a run starts."""
    place = pathlib.Path(local_path(field, start))
    if (steps := find_steps(place)) is not None:
        return tokenizer_of_run(Store(str(steps)))
    path = (place if place.is_dir() else place.parent) / TOKENIZER_NAME
    is_there = find_config(start) is not None and path.exists()
    record = text.load_tokenizer(path).record if is_there else None
    return CheckpointTokenizer(record, path)


def check_start(starts: Mapping[str, str], data: schema.Data, vocab_size: int) -> None:
    """Refuses to train or distil a checkpoint on tokens of another tokenizer.

    `starts` maps settings to checkpoints, or to '' for no checkpoint. Process 0 warns
    where the data or the checkpoint has no tokenizer, and where texts begin with
    different ids. The data may have tokens that the checkpoint lacks.
    """
    for field, start in starts.items():
        # Stored outcomes name the tokenizer of their rows.
        is_outcomes = field == "distill.teacher" and is_stored(start)
        if start and not is_outcomes:
            _check_checkpoint(data, read_record(data, vocab_size), field, start)


def _check_checkpoint(
    data: schema.Data, mine: TokenizerRecord, field: str, start: str
) -> None:
    """Compares the tokenizer of the data with the tokenizer of one checkpoint."""
    theirs = tokenizer_of_start(field, start)
    key = "path" if data.source == "tokens" else "source"
    value = getattr(data, key)
    names = f"data.{key}={value!r}", f"{field}={start!r}"
    if theirs.record is None:
        message = "%s has no tokenizer that zjax reads: nothing compares it with %s"
        _warn(message, names[::-1])
    elif mine.digest == theirs.record.digest:
        if mine.bos_id != theirs.record.bos_id:
            ids = f"{mine.bos_id} and {theirs.record.bos_id}"
            _warn("texts of %s and of %s begin with other ids: %s", (*names, ids))
    # Without files, ids cannot be compared: the user is warned, not stopped.
    elif {mine.name, theirs.record.name} & {*_WITHOUT_FILES}:
        _warn(
            "%s has the tokenizer %r, %s has %r: ids mean other tokens than before; "
            "prepare text with the tokenizer of the checkpoint",
            (names[0], mine.name, names[1], theirs.record.name),
        )
    else:
        path = pathlib.Path(data.path) / TOKENIZER_NAME
        found = _find_difference(path, theirs.path)
        if found:
            problem = f"has another tokenizer than {names[1]}: {found}"
            remedy = f"prepare text with --tokenizer={theirs.path}, or conversations "
            remedy += f"with --chat={theirs.path.parent}"
            raise ConfigError(Problem(f"data.{key}", value, problem, remedy))


def _find_difference(path: pathlib.Path, other: pathlib.Path) -> str:
    """Names the first id with two different tokens; empty if there is none."""
    if not other.exists():
        return "the files of the latter are not there to compare ids"
    mine, theirs = (
        {number: token for token, number in text.load_library(x).get_vocab().items()}
        for x in (path, other)
    )
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number] != theirs[number]:
            return f"id {number} is {mine[number]!r}, and {theirs[number]!r} there"
    if new := sorted(mine.keys() - theirs.keys()):
        first = f"{len(new):,}", mine[new[0]], new[0]
        _warn("the data has %s tokens more than the checkpoint, first %r, id %d", first)
    return ""


def _warn(message: str, values: tuple[Any, ...]) -> None:
    """Warns on process 0."""
    if jax.process_index() == 0:
        logging.warning(message, *values)


def keep_tokenizer(data: schema.Data, directory: pathlib.Path) -> None:
    """Copies tokenizer files of the data beside the checkpoints of a run."""
    path = pathlib.Path(data.path) / TOKENIZER_NAME
    if data.source != "tokens" or not path.exists():
        return
    folder = directory / RUN_FOLDER
    partial = folder.with_name(f".{RUN_FOLDER}.partial")
    with writing(folder):
        for old in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_files(path, partial)
        # Renamed last, so that a folder of this name is complete.
        partial.rename(folder)


def write_tokenizer(
    folder: pathlib.Path, trained: CheckpointTokenizer, start: pathlib.Path | None
) -> dict[str, Any]:
    """Writes the tokenizer of an export, and returns ids for config.json.

    The tokenizer belongs to the data of the run. Files that the data lacks, such as
    files of slow tokenizers, and end ids come from the checkpoint with which the run
    began, if the tokenizers are equal; all files do where the run has no record.
    """
    record = trained.record
    names, values = list[str](), {}
    # First, so that files of the run's data replace files of the start.
    if start is not None and _shares_tokenizer(record, start):
        names, values = copy_files(start / TOKENIZER_NAME, folder), _token_ids(start)
        _report(start, names)
        # Data that an earlier zjax prepared records only one end id.
        if record is not None and TOKENIZER_NAME in names:
            ends = text.load_tokenizer(start / TOKENIZER_NAME).end_ids
            record = record.with_ends(ends)
    if record is None or record.name == "numbers":
        return values
    if record.name == "bytes":
        text.write_bytes_tokenizer(folder)
    elif trained.path.exists():
        # Raises if the file has other tokens than the record.
        text.load_tokenizer(trained.path, record)
        _report(trained.path.parent, copy_files(trained.path, folder))
    elif not names:
        message = "tokenizer: %s is missing; the export has no tokenizer"
        logging.warning(message, trained.path)
        return {**values, **record.config_ids()}
    write_ends(folder, record)
    return {**values, **record.config_ids()}


def _shares_tokenizer(record: TokenizerRecord | None, start: pathlib.Path) -> bool:
    """Whether files of a checkpoint belong to the tokenizer of a run.

    True where the run has no record, so that an export copies the files of the start.
    """
    if record is None or record.name == "numbers":
        return True
    path = start / TOKENIZER_NAME
    return path.exists() and text.load_tokenizer(path).record.digest == record.digest


def _report(source: pathlib.Path, names: list[str]) -> None:
    """Logs which tokenizer files an export copies."""
    logging.warning("tokenizer: %s of %s", ", ".join(names) or "no file", source)


def _token_ids(source: pathlib.Path) -> dict[str, Any]:
    """Reads the ids that begin, end and pad a text from a config.json."""
    if not (source / CONFIG_NAME).is_file():
        return {}
    values = read_config(source / CONFIG_NAME)
    return {name: values[name] for name in _IDS if name in values}
