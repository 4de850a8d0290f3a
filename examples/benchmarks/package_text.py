"""Text of this machine as token files: the source of Python and of its packages.

Files are taken in the order of a hash of their names, so that the limit cuts at random.
"""

import hashlib
import pathlib
import sys
import sysconfig

from zjax.data import prepare

LIMIT_BYTES = 72 << 20
"""Most text to read; a token has about three bytes."""
MAX_FILE_BYTES = 1 << 18
"""Larger files are tables that were generated."""
TOKENIZER = "bpe:4096"
"""A small vocabulary, so that few tokens are too rare to be learnt in a short run."""


def prepare_text(
    directory: pathlib.Path,
    limit: int = LIMIT_BYTES,
    tokenizer: str = TOKENIZER,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes token files for `data.source='tokens'`, unless they are there.

    Args:
        directory: Directory to create.
        limit: Most bytes of text.
        tokenizer: As for `zjax data prepare`.
        max_file_bytes: Most bytes of a file; longer ones are left out.
    """
    if directory.exists():
        return
    files = choose_files(limit, max_file_bytes)
    print(f"text: {len(files)} files", file=sys.stderr, flush=True)
    prepare.prepare(files, directory, tokenizer=tokenizer, validation_fraction=0.02)


def choose_files(limit: int, max_file_bytes: int) -> list[pathlib.Path]:
    """Python files of the standard library and of installed packages."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    found = {
        path.relative_to(root).as_posix(): path
        for root in map(pathlib.Path, sorted(roots))
        for path in root.rglob("*.py")
    }
    chosen, num_bytes = [], 0
    for name in sorted(found, key=hashed):
        size = found[name].stat().st_size
        if 0 < size <= max_file_bytes and is_text(found[name]):
            num_bytes += size
            if num_bytes > limit:
                break
            chosen.append(found[name])
    return chosen


def hashed(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def is_text(path: pathlib.Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
