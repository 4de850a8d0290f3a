"""Digests of weights that tell whether files at a path have changed."""

import hashlib
import pathlib

from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.checkpoint.sums import SUMS_FILE
from zjax.errors import CheckpointError
from zjax.files import local_path
from zjax.weights.config_json import CONFIG_NAME


def digest_start(path: str) -> str:
    """Digests the files of `checkpoint.init_from`: a run, a directory or a file."""
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    steps = find_steps(place)
    if steps is None:
        return digest_files(place)
    store = Store(str(steps))
    return digest_step(store.path(store.resolve(None)))


def digest_step(folder: pathlib.Path) -> str:
    """Digests the checksums of a checkpoint, or the times of files without them."""
    path = folder / SUMS_FILE
    if not path.exists():
        return _digest_times([x for x in folder.rglob("*") if x.is_file()])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(place: pathlib.Path) -> str:
    """Digests what tells whether a Hugging Face checkpoint has changed."""
    patterns = "*.safetensors", "*.safetensors.index.json", CONFIG_NAME
    files = [place] if place.is_file() else [x for p in patterns for x in place.glob(p)]
    return _digest_times(files)


def _digest_times(files: list[pathlib.Path]) -> str:
    """Digests names, sizes and times of files."""
    found = [(x.name, x.stat().st_size, x.stat().st_mtime_ns) for x in sorted(files)]
    return hashlib.sha256(repr(found).encode()).hexdigest()
