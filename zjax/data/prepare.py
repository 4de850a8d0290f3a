"""Converts text, conversations and token ids to token files: `zjax data prepare`."""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from rich import console, progress

from zjax.data import documents, store
from zjax.data import tokenizer as text
from zjax.data.chat import Chat, load_chat
from zjax.data.examples import COMPARED, LABELS, LAYOUTS
from zjax.data.sequences import (
    Encoder,
    Mismatches,
    TalkEncoder,
    TextEncoder,
    end_ids,
)
from zjax.data.tables import BrokenRecords
from zjax.data.tokenizer_files import (
    END_TOKENS,
    MAX_VOCAB,
    TOKENIZER_NAME,
    copy_files,
    write_ends,
    write_files,
)
from zjax.errors import DataError, Problem
from zjax.files import local_path, new_directory

BPE_TRAINING_BYTES = 1 << 30
"""Maximum bytes of text, from the start of the training split, that a BPE learns
from."""
# 256 bytes, an end token and one merge at least.
MIN_BPE, MAX_BPE = text.NUM_BYTES + 2, 1 << 20
ENCODE_DOCUMENTS = 256
"""Documents that are encoded at a time, in threads of the tokenizer."""

MAX_PROBLEMS = 20
"""Problems of examples that are collected before they are told."""
_MAX_NAMED = 5
"""Maximum number of special tokens that a warning names."""


class _Assigned(NamedTuple):
    """A document and the split that receives it."""

    split: str
    document: documents.Document


def prepare(
    inputs: Sequence[str | pathlib.Path],
    output: str | pathlib.Path,
    *,
    tokenizer: str = "bytes",
    validation_fraction: float = 0.01,
    text_field: str = "text",
    chat: str = "",
    examples: str = "",
    special_tokens: bool = False,
    skip_broken: bool = False,
) -> store.Meta:
    """Writes a directory of token files for `data.source='tokens'`.

    Documents are the objects of JSON Lines and JSON arrays, the rows of Parquet files
    and of a directory that `datasets.Dataset.save_to_disk` wrote, and text files. JSON
    and text may be compressed (`.gz`, `.bz2`, `.xz`). Each document begins with BOS, if
    the tokenizer begins texts so, and ends with an end token. Validation takes the
    second document, then a document whenever it has less than `validation_fraction` of
    the text; a text file counts as blocks of about 64 KiB.

    Args:
        inputs: Paths of files, or of directories with files that are all read.
        output: Directory to create; it appears only when it is complete.
        tokenizer: Name `bytes`, `bpe:<vocab_size>` to learn a BPE from the training
            text, the path of a `tokenizer.json`, or `ids:<vocab_size>` for token ids of
            no known tokenizer, with the last id as end token.
        validation_fraction: Fraction of the text to hold out, 0 to less than 1.
        text_field: Field of JSON objects, or column of tables, with the text or a list
            of token ids. `labels` beside ids say which ids have a loss, and
            `attention_mask` which are padding. Files `.bin` are streams of uint16 ids.
        chat: Directory of a Hugging Face checkpoint with the tokenizer and the chat
            template for conversations, instead of `tokenizer` and `text_field`; the
            records have a layout of `zjax.data.conversations`. Only answers then have
            a loss, and documents have no end token that the template does not write.
        examples: Kind of the records, of `zjax.data.examples.LAYOUTS`, if they are
            completions of prompts, texts or with `chat` conversations. Only completions
            have a loss. Empty for texts and conversations.
        special_tokens: Whether names of special tokens in a text are encoded as special
            tokens, as in conversations rendered before; else as ordinary text.
        skip_broken: Whether records that cannot be used are left out, and counted in
            the log, instead of refused. Files that cannot be read are always refused.

    Returns:
        Vocabulary, and sizes of the splits that were written.

    Raises:
        DataError: An input, the tokenizer or the output is unusable; no files remain.
    """
    check_types(
        inputs,
        output,
        validation_fraction,
        tokenizer=tokenizer,
        text_field=text_field,
        chat=chat,
        examples=examples,
    )
    if output != "":
        output = local_path("output", output, DataError, creates=True)
    inputs = [local_path("input", path, DataError) for path in inputs]
    if tokenizer.endswith(".json"):
        tokenizer = local_path("tokenizer", tokenizer, DataError)
    template = None
    if chat:
        chat = local_path("chat", chat, DataError)
        template = load_chat(chat)
        tokenizer = os.path.join(chat, TOKENIZER_NAME)
    problems = _check_settings(output, tokenizer, validation_fraction)
    problems += _check_examples(examples, text_field, tokenizer)
    if problems:
        raise DataError(*problems)
    files = documents.list_files(inputs)
    output = pathlib.Path(output)

    num_told = MAX_PROBLEMS if examples else 1
    broken = BrokenRecords(skip_broken, num_told)

    def read_file(
        file: pathlib.Path, told: set[str], broken: BrokenRecords
    ) -> Iterator[documents.Document]:
        if examples:
            has_template = template is not None
            return documents.read_examples(file, examples, has_template, told, broken)
        if template is not None:
            return documents.read_conversations(file, told, broken)
        return documents.read_documents(file, text_field, broken)

    def read(
        bar: progress.Progress, label: str, broken: BrokenRecords
    ) -> Iterator[_Assigned]:
        texts = _read_all(files, read_file, bar, label, broken)
        return _assign_splits(texts, validation_fraction)

    with (
        _output_directory(output) as partial,
        progress.Progress(console=console.Console(stderr=True)) as bar,
    ):
        # Lazy: only a BPE reads the documents twice; broken records are counted once,
        # below.
        learning = read(bar, "Learning", BrokenRecords(skip_broken, num_told))
        vocabulary = _make_tokenizer(tokenizer, partial, learning)
        assigned, record = read(bar, "Encoding", broken), vocabulary.record
        # The first document says what all documents hold: text, ids or labels.
        first = [*itertools.islice(assigned, 1)]
        assigned = _of_one_kind(itertools.chain(first, assigned))
        tokens = first[0].document.tokens if first else None
        has_labels = tokens is not None and tokens.answers is not None
        has_answers = template is not None or has_labels or bool(examples)
        compared = examples if examples in COMPARED else ""
        writers = _Writers(partial, vocabulary, has_answers, compared)
        with contextlib.closing(writers):
            if examples:
                encoder = TextEncoder(vocabulary, special_tokens)
                if template is not None:
                    encoder = TalkEncoder(template)
                _write_examples(writers, encoder, assigned, broken)
                record = record.with_ends(encoder.warn_of_open_ends())
            elif tokens is not None:
                _write_ids(writers, vocabulary, assigned)
            elif template is None:
                _write_texts(writers, vocabulary, assigned, special_tokens)
            else:
                ends = _write_talks(writers, template, assigned, broken)
                record = record.with_ends(ends)
            broken.finish()
        _check_splits(writers.sizes(), inputs, validation_fraction)
        if (partial / TOKENIZER_NAME).exists():
            write_ends(partial, record)
        meta = store.Meta(
            tokenizer=record,
            dtype=_token_dtype(vocabulary),
            splits=writers.sizes(),
            has_answers=has_answers,
            examples=compared,
        )
        store.write_meta(partial, meta)
    return meta


@contextlib.contextmanager
def _output_directory(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory that becomes `output` at the end; names the file at fault."""
    try:
        with new_directory(output) as partial:
            yield partial
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "name a folder that can be made, on a disk with room"
        raise DataError(Problem("output", str(output), problem, remedy)) from error


def check_types(
    inputs: Any, output: Any, validation_fraction: Any, **texts: Any
) -> None:
    """Refuses arguments of `prepare` of another type, which flags cannot have."""
    problems = []
    if isinstance(inputs, str | os.PathLike):
        value, remedy = os.fspath(inputs), "give a list of paths"
        problems.append(Problem("inputs", value, "is a single path", remedy))
    elif not isinstance(inputs, Sequence):
        remedy = "give a list of paths"
        problems.append(Problem("inputs", inputs, "is no list", remedy))
    else:
        problems += [
            Problem(name, path, "is not a path", "give a text")
            for name, path in [*(("inputs", x) for x in inputs), ("output", output)]
            if not isinstance(path, str | os.PathLike)
        ]
    if not isinstance(validation_fraction, int | float):
        problem, remedy = "is not a number", "use 0 or more and less than 1"
        value = validation_fraction
        problems.append(Problem("validation_fraction", value, problem, remedy))
    for name, value in texts.items():
        if not isinstance(value, str):
            problems.append(Problem(name, value, "is not a text", "give a text"))
    if problems:
        raise DataError(*problems)


def _check_settings(
    output: str | pathlib.Path, tokenizer: str, validation_fraction: float
) -> list[Problem]:
    """Problems of the arguments of `prepare`."""
    problems = []
    if not str(output):
        problems.append(Problem("output", "", "is not given", "name a folder to make"))
    elif os.path.lexists(output):
        problem = "exists already"
        problems.append(
            Problem("output", str(output), problem, "remove it or name another")
        )
    bpe = re.fullmatch(r"bpe:([0-9]{1,18})", tokenizer)
    if bpe and int(bpe[1]) > MAX_BPE:
        problem, remedy = (
            "is more than a text has use for",
            f"use at most bpe:{MAX_BPE}",
        )
        problems.append(Problem("tokenizer", tokenizer, problem, remedy))
    elif bpe and int(bpe[1]) < MIN_BPE:
        problem = "is smaller than the 256 bytes, an end token and one merge"
        remedy = f"use bpe:{MIN_BPE} or more"
        problems.append(Problem("tokenizer", tokenizer, problem, remedy))
    ids = re.fullmatch(r"ids:([0-9]{1,18})", tokenizer)
    if ids and not 2 <= int(ids[1]) <= MAX_VOCAB:
        problem = "is no number of ids"
        remedy = f"use ids:2 to ids:{MAX_VOCAB}"
        problems.append(Problem("tokenizer", tokenizer, problem, remedy))
    is_known = bpe or ids or tokenizer == "bytes" or tokenizer.endswith(".json")
    if not is_known:
        problem = "is not a choice"
        remedy = "use bytes, bpe:<vocab_size>, the path of a tokenizer.json, or "
        remedy += "ids:<vocab_size> for token ids"
        problems.append(Problem("tokenizer", tokenizer, problem, remedy))
    if not 0 <= validation_fraction < 1:
        problem = "is not a part of the text"
        remedy = "use 0 or more and less than 1"
        problems.append(
            Problem("validation_fraction", validation_fraction, problem, remedy)
        )
    return problems


def _check_examples(examples: str, text_field: str, tokenizer: str) -> list[Problem]:
    """Problems of a kind of examples, and of arguments that the kind does not read."""
    problems = []
    if not examples:
        return problems
    if examples not in LAYOUTS:
        remedy = f"use {', '.join(LAYOUTS)}, or leave it out"
        problems.append(Problem("examples", examples, "is not a choice", remedy))
    if text_field != "text":
        problem, remedy = "is not read with examples", "leave it out"
        problems.append(Problem("text_field", text_field, problem, remedy))
    if tokenizer.startswith("ids:"):
        problem, remedy = "encodes no texts", "use a tokenizer of texts"
        problems.append(Problem("tokenizer", tokenizer, problem, remedy))
    return problems


ReadFile = Callable[
    [pathlib.Path, set[str], BrokenRecords], Iterator[documents.Document]
]
"""Function of a file, the names of fields that the log has told, and broken records."""


def _read_all(
    files: Sequence[pathlib.Path],
    read_file: ReadFile,
    bar: progress.Progress,
    label: str,
    broken: BrokenRecords,
) -> Iterator[documents.Document]:
    """Reads the documents of all files, with a progress bar; skips empty documents."""
    total = sum(file.stat().st_size for file in files)
    task = bar.add_task(label, total=total)
    told: set[str] = set()
    for file in files:
        found = read_file(file, told, broken)
        # By hand, as a read error must name the file.
        while document := _read_next(file, found):
            bar.advance(task, document.num_bytes)
            if document.size:
                yield document


def _read_next(
    file: pathlib.Path, documents_in: Iterator[documents.Document]
) -> documents.Document | None:
    """Reads the next document of a file; None at the end."""
    try:
        return next(documents_in, None)
    except OSError as error:
        reason = " ".join(str(error.strerror or error).split())
        problem = f"cannot be read: {reason}"
        remedy = "check the file and its disk"
        raise DataError(Problem("input", str(file), problem, remedy)) from error


def _assign_splits(
    documents_in: Iterator[documents.Document], validation_fraction: float
) -> Iterator[_Assigned]:
    """Assigns each document to a split, by size."""
    num_seen, num_held_out = 0, 0
    for document in documents_in:
        # Strictly less: the first document is for training, the second for validation.
        held_out = num_held_out < validation_fraction * num_seen
        size = document.size
        num_seen += size
        num_held_out += size * held_out
        yield _Assigned("validation" if held_out else "train", document)


def _make_tokenizer(
    tokenizer: str, directory: pathlib.Path, assigned: Iterator[_Assigned]
) -> text.Tokenizer:
    """Makes the tokenizer, and writes the tokenizer files beside the tokens."""
    if tokenizer == "bytes":
        return text.make_bytes()
    if tokenizer.startswith("ids:"):
        return text.make_numbers(int(tokenizer.removeprefix("ids:")))
    if not tokenizer.startswith("bpe:"):
        vocabulary = text.load_tokenizer(tokenizer)
        copy_files(pathlib.Path(tokenizer), directory)
        return vocabulary
    size = int(tokenizer.removeprefix("bpe:"))
    with text.data_errors(tokenizer, "cannot be learnt", "use a smaller one"):
        library = text.train_bpe(_training_texts(assigned), size)
    write_files(directory, library.to_str(pretty=True), {"eos_token": END_TOKENS[0]})
    # Named by the choice, as this directory is temporary.
    found = text.load_tokenizer(directory / TOKENIZER_NAME)
    return dataclasses.replace(
        found, record=dataclasses.replace(found.record, name=tokenizer)
    )


def _training_texts(assigned: Iterator[_Assigned]) -> Iterator[str]:
    """Yields texts of the training split, up to `BPE_TRAINING_BYTES`."""
    num_bytes = 0
    for split, document in assigned:
        if num_bytes >= BPE_TRAINING_BYTES:
            return
        if split == "train":
            num_bytes += len(document.text.encode())
            yield document.text


def _token_dtype(vocabulary: text.Tokenizer) -> str:
    return "uint16" if vocabulary.vocab_size <= 1 << 16 else "uint32"


class _Writers(dict[str, store.SplitWriter]):
    """Writers by split, opened on first use."""

    def __init__(
        self,
        directory: pathlib.Path,
        vocabulary: text.Tokenizer,
        has_answers: bool,
        examples: str,
    ):
        super().__init__()
        self._directory, self._has_answers = directory, has_answers
        self._dtype, self.examples = _token_dtype(vocabulary), examples

    def __missing__(self, split: str) -> store.SplitWriter:
        made = store.SplitWriter(
            self._directory, split, self._dtype, self._has_answers, self.examples
        )
        return self.setdefault(split, made)

    def close(self) -> None:
        """Flushes all splits to disk."""
        # Closes all writers even if one fails, as on a full disk.
        with contextlib.ExitStack() as stack:
            for writer in self.values():
                stack.callback(writer.close)

    def sizes(self) -> dict[str, store.Split]:
        """Sizes of the splits, by name."""
        return {name: writer.sizes for name, writer in self.items()}


def _of_one_kind(assigned: Iterator[_Assigned]) -> Iterator[_Assigned]:
    """Refuses documents of text among token ids, and labels in some documents only."""
    kinds = set()
    for each in assigned:
        tokens = each.document.tokens
        kinds.add((tokens is None, tokens is not None and tokens.answers is None))
        if len(kinds) > 1:
            problem = "holds text, token ids or labels in some records only"
            remedy = "prepare what differs into directories of their own"
            raise DataError(Problem("input", "given", problem, remedy))
        yield each


def _chunks(assigned: Iterator[_Assigned]) -> Iterator[list[_Assigned]]:
    """Groups the documents that are encoded together."""
    while chunk := list(itertools.islice(assigned, ENCODE_DOCUMENTS)):
        yield chunk


def _write_texts(
    writers: _Writers,
    vocabulary: text.Tokenizer,
    assigned: Iterator[_Assigned],
    special_tokens: bool,
) -> None:
    """Encodes texts, with BOS and end token where a text begins and ends.

    Consecutive blocks of one text in a split are one document.
    """
    num_texts, num_spelling, names = 0, 0, dict[str, None]()
    before, is_counted = "", False
    for chunk in _chunks(assigned):
        texts = [document.text for _, document in chunk]
        encoded = vocabulary.encode_texts(texts, special_tokens)
        for (split, document), ids in zip(chunk, encoded, strict=True):
            if split != before and before:  # the text goes on in another split
                writers[before].end_document()
            before = split
            ids = vocabulary.begin(ids) if document.begins else ids
            writers[split].append(vocabulary.end(ids) if document.ends else ids)
            if document.ends:
                writers[split].end_document()
            if document.begins:
                num_texts, is_counted = num_texts + 1, False
            found = vocabulary.find_special_tokens(document.text)
            if found and not special_tokens:
                names |= dict.fromkeys(found)
                num_spelling, is_counted = num_spelling + (not is_counted), True
    if names:
        logging.warning(
            "texts spell special tokens of the tokenizer, which are encoded as "
            "ordinary text: %s in %s of %s texts; give conversations with --chat, or "
            "set --special_tokens to encode the names as these tokens",
            ", ".join([*names][:_MAX_NAMED]),
            f"{num_spelling:,}",
            f"{num_texts:,}",
        )


def _write_ids(
    writers: _Writers,
    vocabulary: text.Tokenizer,
    assigned: Iterator[_Assigned],
) -> None:
    """Writes ids unchanged; end tokens of a stream end documents."""
    before = ""
    for split, document in assigned:
        assert document.tokens is not None
        ids, answers = document.tokens
        if (largest := int(ids.max())) >= vocabulary.vocab_size:
            problem = f"has {vocabulary.vocab_size} ids, but the input holds {largest}"
            remedy = "give the tokenizer of these ids, or ids:<vocab_size>"
            raise DataError(
                Problem("tokenizer", vocabulary.record.name, problem, remedy)
            )
        if split != before and before:  # a stream goes on in another split
            writers[before].end_document()
        before = split
        if answers is not None:
            writers[split].append_answers(ids, answers)
        elif document.ends:
            writers[split].append(ids)
            writers[split].end_document()
        else:
            # A stream has no other boundaries of documents.
            is_end = np.isin(ids, vocabulary.record.end_ids)
            for piece in np.split(ids, np.flatnonzero(is_end) + 1):
                writers[split].append(piece)
                if piece.size and piece[-1] in vocabulary.record.end_ids:
                    writers[split].end_document()
    # A stream may end without an end token.
    if before:
        writers[before].end_document()


def _write_talks(
    writers: _Writers,
    chat: Chat,
    assigned: Iterator[_Assigned],
    broken: BrokenRecords,
) -> tuple[int, ...]:
    """Encodes conversations; returns the ids that end answers."""
    num_talks, num_samples, ends = 0, 0, collections.Counter[int | None]()
    for chunk in _chunks(assigned):
        talks = [document.talk for _, document in chunk if document.talk is not None]
        rendered = chat.render_each(talks)
        for (split, _), talk, texts in zip(chunk, talks, rendered, strict=True):
            encoded = broken.read(chat.samples_of, talk, texts)
            if encoded is None:
                continue
            samples, found = encoded
            for ids, answers in samples:
                writers[split].append_answers(ids, answers)
            num_talks, num_samples = num_talks + 1, num_samples + len(samples)
            ends.update(found)
    if num_samples > num_talks:
        logging.warning(
            "the chat template rewrites earlier turns: %s conversations are %s "
            "documents, which repeat them before each answer",
            f"{num_talks:,}",
            f"{num_samples:,}",
        )
    return end_ids(chat, ends)


def _write_examples(
    writers: _Writers,
    encoder: Encoder,
    assigned: Iterator[_Assigned],
    broken: BrokenRecords,
) -> None:
    """Encodes examples, each labelled one with another prompt's completion."""
    mismatches = collections.defaultdict[str, Mismatches](Mismatches)
    for chunk in _chunks(assigned):
        given = [(split, x.example) for split, x in chunk if x.example is not None]
        if writers.examples == LABELS:
            given = [
                (split, paired)
                for split, example in given
                for paired in mismatches[split].add(example)
            ]
        encoded = encoder.encode([example for _, example in given], broken)
        for (split, example), sequences in zip(given, encoded, strict=True):
            # The files of a command that fails are removed: nothing need be written.
            if sequences is None or broken.is_lost:
                continue
            if writers.examples:
                writers[split].append_example(sequences, example.is_desirable)
            else:
                [(ids, answers)] = sequences
                writers[split].append_answers(ids, answers)
    if not broken.is_lost:
        for split, each in mismatches.items():
            each.finish(split)


def _check_splits(
    splits: dict[str, store.Split],
    inputs: Sequence[str | pathlib.Path],
    validation_fraction: float,
) -> None:
    """Refuses empty splits; warns if the held-out fraction is far off."""
    if not splits:
        paths = ", ".join(map(str, inputs))
        raise DataError(Problem("input", paths, "holds no text", "give some"))
    if validation_fraction > 0 and "validation" not in splits:
        raise DataError(
            Problem(
                "validation_fraction",
                validation_fraction,
                "leaves nothing for validation: the input is a single document",
                "use 0, or give the text in several files or lines",
            )
        )
    fraction = held_out(splits)
    if fraction > 2 * validation_fraction or fraction < validation_fraction / 2:
        logging.warning(
            "validation_fraction=%g holds out %.1f %% of the tokens: documents are "
            "held out whole; give more of them, or smaller ones",
            validation_fraction,
            100 * fraction,
        )


def held_out(splits: Mapping[str, store.Split]) -> float:
    """Fraction of the tokens that is held out."""
    sizes = {name: split.num_tokens for name, split in splits.items()}
    return sizes.get("validation", 0) / sum(sizes.values())
