"""Blocks that are compressed so far, beside the output, to go on with."""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.files import (
    MAX_INDEX_BYTES,
    make_directory,
    new_file,
    parse_json,
    read_text,
)
from zjax.processes.member_files import LOCK_FILE
from zjax.weights.files import open_file, writable, write_file
from zjax.weights.source import Entry, Source

_INDEX = "progress.json"
_SCALES = "scales:"
"""Beginning of the names of scales in a file."""
CONTENTS = "contents of the weights"
"""Name of the origin that makes all earlier blocks worthless when it changes."""


def directory_of(output: str) -> pathlib.Path:
    """Returns the hidden directory of blocks beside an output."""
    target = pathlib.Path(output)
    return target.with_name(f".{target.name}.blocks")


def foreign_problems(output: str) -> Iterator[Problem]:
    """Yields a problem if the directory of blocks holds other files."""
    directory = directory_of(output)
    with writable(output):
        files = {x.name for x in directory.iterdir()} if directory.exists() else set()
    if files - {LOCK_FILE} and _read_index(directory) is None:
        problem = f"keeps blocks in {directory}, which has no index of blocks"
        remedy = "remove that directory, or name another output"
        yield Problem("--output", output, problem, remedy)


def _read_index(directory: pathlib.Path) -> tuple[dict[str, Any], Any] | None:
    """Reads origin and blocks of an index; None if it is missing or damaged."""
    try:
        found = parse_json(read_text(directory / _INDEX, MAX_INDEX_BYTES))
        origin, blocks = found["origin"], found["blocks"]
        sums = {str(n): (str(x[0]), [*map(str, x[1])]) for n, x in blocks.items()}
        return dict(origin), sums
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


class PartialOutput:
    """Compressed blocks in a directory beside the output.

    Blocks of other weights at the same path are not taken, and compression begins
    anew. A block whose checksum is wrong is compressed again.

    Args:
        output: Directory of the output; the blocks lie in a hidden directory beside it.
        origin: All that the blocks depend on.

    Raises:
        ConfigError: The directory holds blocks of other settings, or other files.
    """

    def __init__(self, output: str, origin: Mapping[str, Any]):
        self.directory = directory_of(output)
        self._origin = json.loads(json.dumps(origin))
        self._index: dict[str, Any] = {"origin": self._origin, "blocks": {}}
        self.restarted = ""
        """Why blocks of an earlier call are not taken; empty if all are."""
        self._open(output)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are there."""
        return len(self._index["blocks"])

    def _open(self, output: str) -> None:
        """Takes the blocks of an earlier call, or begins anew."""
        if problems := [*foreign_problems(output)]:
            raise ConfigError(*problems)
        origin, blocks = _read_index(self.directory) or ({}, {})
        names = [
            name
            for name in sorted(origin.keys() | self._origin.keys())
            if origin.get(name) != self._origin.get(name)
        ]
        others = ", ".join(name for name in names if name != CONTENTS)
        if blocks and others:
            # A mistyped flag must not cost the hours that the blocks took.
            problem = (
                f"has {len(blocks)} blocks of an earlier call, and {others} differ"
            )
            remedy = f"remove {self.directory} to begin anew, or name another output"
            raise ConfigError(Problem("--output", output, problem, remedy))
        if blocks and names:
            self.restarted = f"{CONTENTS} changed"
        elif blocks:
            self._index["blocks"] = blocks
        with writable(output):
            make_directory(self.directory)
            self._write_index()

    def _write_index(self) -> None:
        """Writes origin and checksums; files that are not named there do not count."""
        with new_file(self.directory / _INDEX) as partial:
            partial.write_text(json.dumps(self._index))

    def write(
        self,
        index: int,
        params: Mapping[str, jax.Array],
        scales: Mapping[str, jax.Array],
        notes: Sequence[str],
    ) -> None:
        """Writes a block: parameters, scales and notes."""
        named = {f"{_SCALES}{path}": x for path, x in scales.items()}
        arrays = {name: np.asarray(x) for name, x in (dict(params) | named).items()}
        entries = {name: Entry(x.shape, str(x.dtype)) for name, x in arrays.items()}
        source = Source(entries, lambda name, index: arrays[name][index])
        path = self._path(index)
        with writable(str(path)):
            with new_file(path) as partial:
                write_file(partial, source, {})
            self._index["blocks"][str(index)] = _digest(path), [*notes]
            self._write_index()

    def _path(self, index: int) -> pathlib.Path:
        return self.directory / f"block-{index:05}.safetensors"

    def read(self, index: int) -> tuple[dict[str, np.ndarray], list[str]] | None:
        """Reads parameters and notes of a block; None if it is missing or damaged."""
        digest, notes = self._index["blocks"].get(str(index), ("", []))
        path = self._path(index)
        if not digest or not path.is_file() or _digest(path) != digest:
            return None
        params, _ = self.open(index)
        return {name: params.read_all(name) for name in params.entries}, notes

    def open(self, index: int) -> tuple[Source, Source]:
        """Opens parameters and scales of a block that is there, by path."""
        file = open_file(self._path(index), "output", "remove it, and run again")
        source = Source(file.entries, file.read)
        scales = [name for name in source.entries if name.startswith(_SCALES)]
        params = {_slashes(x): x for x in source.entries if x not in scales}
        named = {_slashes(x.removeprefix(_SCALES)): x for x in scales}
        return source.renamed(params), source.renamed(named)

    def remove(self) -> None:
        """Removes the blocks, once the output is complete."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _slashes(name: str) -> str:
    """Returns the path of a safetensors name."""
    return name.replace(".", "/")


def _digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
