"""Fields of a request: read by type, and refused by name."""

import difflib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from zjax.errors import Problem
from zjax.serve.refusals import Refusal, refuse_problems

_MAX_UNKNOWN = 10
"""Unknown fields that a refusal lists: a body may have a million."""
_MAX_NAME = 50
"""Characters of an unknown name that a refusal shows."""


class Kind(NamedTuple):
    """Values that a field may have."""

    accepts: Callable[[Any], bool]
    problem: str
    remedy: str


def _is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer: `true` is none."""
    return type(value) is int


def _is_texts(value: Any) -> bool:
    """Whether a value is a list of texts, or one text."""
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(x, str) and x for x in texts)


def _is_ids(value: Any) -> bool:
    """Whether a value is a list of one integer or more."""
    return isinstance(value, list) and bool(value) and all(map(_is_integer, value))


def _is_prompt(value: Any) -> bool:
    """Whether a value is one prompt or several, as texts or as ids."""
    if isinstance(value, str) or _is_ids(value):
        return True
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(x, str) for x in value) or all(map(_is_ids, value))


TEXT = Kind(lambda x: isinstance(x, str), "is no text", "write a string")
SWITCH = Kind(lambda x: isinstance(x, bool), "is no switch", "write true or false")
INTEGER = Kind(_is_integer, "is no integer", "write one, such as 16")
IDS = Kind(_is_ids, "is no list of token ids", "write one, such as [2]")
TEXTS = Kind(_is_texts, "is no text or list of texts", 'write one, such as ["\\n"]')
OBJECT = Kind(lambda x: isinstance(x, dict), "is no object", "write {...}")
MESSAGES = Kind(
    lambda x: isinstance(x, list) and bool(x),
    "is no list of messages",
    'write [{"role": "user", "content": "..."}]',
)
PROMPT = Kind(
    _is_prompt,
    "is no prompt",
    "write a text, a list of texts, token ids, or a list of lists of ids",
)


def between(least: int | float, most: int | float) -> Kind:
    """Returns the kind of numbers in a range."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most

    problem = f"is no number from {least:g} to {most:g}"
    return Kind(accepts, problem, "write one in the range")


def integers(least: int, most: int) -> Kind:
    """Returns the kind of integers in a range."""
    problem = f"is no integer from {least} to {most}"
    return Kind(
        lambda x: _is_integer(x) and least <= x <= most,
        problem,
        "write one in the range",
    )


def read_object(body: bytes) -> dict[str, Any]:
    """Parses the JSON object of a request."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        found = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        problem = f"the body cannot be read as JSON ({why}); send an object"
        raise Refusal(400, problem, code="invalid_json") from None
    # Half a character, as "\\ud800", which no text that is sent may have.
    if b"\\u" in body and not _is_unicode(found):
        problem = "the body has half a character (a lone surrogate); send whole ones"
        raise Refusal(400, problem, code="invalid_json")
    if not isinstance(found, dict):
        problem = "the body is no JSON object; send one, such as {...}"
        raise Refusal(400, problem, code="invalid_json")
    return found


def _is_unicode(value: Any) -> bool:
    """Whether all texts of a JSON value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """Fields of one JSON object, of which each is taken once.

    A field that is null counts as not given.

    Example:
        >>> fields = Fields({"n": 2, "stop": None, "top_pp": 0.5})
        >>> fields.take("n", INTEGER, 1), fields.take("stop", TEXTS)
        (2, None)
        >>> fields.take("top_p", between(0, 1), 1.0)
        1.0
        >>> fields.close({})
        Traceback (most recent call last):
        zjax.serve.refusals.Refusal: top_pp=0.5 is no field; did you mean top_p?
    """

    def __init__(self, given: Mapping[str, Any], prefix: str = ""):
        self._left = {name: x for name, x in given.items() if x is not None}
        self._known: list[str] = []
        self._prefix = prefix
        self.problems: list[Problem] = []

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """Returns the value of a field, or the default of a field without one."""
        self._known.append(name)
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not kind.accepts(value):
            self.refuse(name, value, kind.problem, kind.remedy)
            return default
        return value

    def require(self, name: str, kind: Kind, default: Any) -> Any:
        """Returns the value of a field as `take` does, and refuses a missing field."""
        if name not in self._left:
            self.refuse(name, None, "is missing", kind.remedy)
        return self.take(name, kind, default)

    def refuse(self, name: str, value: Any, problem: str, remedy: str) -> None:
        """Notes a problem of a field, for `close` to tell."""
        name = self._prefix + name
        self.problems.append(Problem(name, value, problem, remedy))

    def close(self, without_effect: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses all problems, fields that are unknown, and fields that do nothing.

        `without_effect` has the fields that are not supported, each with the values
        that ask for nothing.
        """
        for name, value in itertools.islice(self._left.items(), _MAX_UNKNOWN):
            if name not in without_effect:
                shown = name[:_MAX_NAME]
                near = difflib.get_close_matches(shown, self._known, n=1)
                remedy = f"did you mean {near[0]}?" if near else "leave it out"
                self.refuse(shown, value, "is no field", remedy)
            elif value not in without_effect[name]:
                self.refuse(name, value, "is not supported", "leave it out")
        if self.problems:
            raise refuse_problems(*self.problems)
