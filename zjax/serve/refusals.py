"""Refusals: errors in the form of OpenAI's API, with a status of HTTP."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from zjax.errors import Problem, ZjaxError

CLIENT_LEFT = 499
"""Status that counts requests of clients that left; nobody receives it."""


class Refusal(Exception):
    """A request that is not answered, or not to the end.

    Args:
        status: Status of HTTP.
        message: The problem, and the remedy.
        param: Field of the request at fault, if one is.
        code: Short name of the error for programs.
        headers: Further headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": str(self), "type": kind}
        return {"error": error | {"param": self.param, "code": self.code}}


def refuse_problems(*problems: Problem, names: Mapping[str, str] = {}) -> Refusal:
    """Makes a refusal that tells all problems, under the names of the API.

    Example:
        >>> problem = Problem("num_samples", 0, "is below 1", "use 1 or more")
        >>> str(refuse_problems(problem, names={"num_samples": "n"}))
        'n=0 is below 1; use 1 or more'
    """
    told = [
        dataclasses.replace(
            each,
            field=names.get(each.field, each.field),
            problem=_renamed(each.problem, names),
        )
        for each in problems
    ]
    # Several prompts may have one problem in common.
    lines = dict.fromkeys(map(str, told))
    return Refusal(400, "\n".join(lines), param=told[0].field)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Names the fields whose values a text quotes, as in `max_new_tokens=3`."""
    return re.sub(r"\b(\w+)(?==)", lambda found: names.get(found[1], found[1]), text)


def refuse_error(error: ZjaxError, names: Mapping[str, str]) -> Refusal:
    """Makes a refusal of an error that the request has caused."""
    return refuse_problems(*error.problems, names=names)


def encode(value: Any) -> bytes:
    """Encodes a value as JSON without spaces."""
    return _JSON.encode(value).encode()


# `json.dumps` would make an encoder for each value.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
