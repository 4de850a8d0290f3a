"""Docstrings name their subjects: no pronoun stands where a reader needs the noun."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = sorted(
    path.parent
    for package in ("zjax", "zjax_kernels")
    for path in [
        *(ROOT / package).glob("*/__init__.py"),
        ROOT / package / "__init__.py",
    ]
)
MAX_PER_THOUSAND = 10
"""References without a noun in 1,000 words of docstrings; optax has 5.5."""
NAMELESS = re.compile(
    r"""\b(
        th(?:at|ose)\ of(?:\ those)? | of\ (?:those|it|them|these|this) | those
      | the\ (?:same|others?|rest) | others | such\ ones? | ones
      | each\ other | of\ (?:its|their)\ own | its | theirs? | them | they | whose
      | what\ (?:is|it|they|an?|the|of) | where\ there\ (?:is|are)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
WORD = re.compile(r"[A-Za-z']+")


@functools.cache
def docstrings_of(room):
    """Docstrings of a room without examples; the top of a package is its own files."""
    is_top = room.parent == ROOT
    paths = room.glob("*.py") if is_top else room.rglob("*.py")
    return [
        (path.relative_to(ROOT), text.partition("Example:")[0])
        for path in sorted(paths)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (text := ast.get_docstring(node))
    ]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_references_have_a_noun(room):
    found, num_words = [], 0
    for path, text in docstrings_of(room):
        num_words += len(WORD.findall(text))
        for sentence in re.split(r"(?<=[.:;])\s", text):
            words = NAMELESS.findall(sentence)
            line = " ".join(sentence.split())
            found += [f"{path}: {word!r} in: {line}" for word in words]
    share = 1_000 * len(found) / num_words
    told = "\n".join(found)
    assert share <= MAX_PER_THOUSAND, f"{share:.1f} in 1,000 words:\n{told}"
