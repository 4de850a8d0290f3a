"""Settings of a server: address, key and limits."""

import dataclasses
import ipaddress
from collections.abc import Iterator

from zjax.errors import ConfigError, Problem

KEY_VARIABLE = "ZJAX_API_KEY"
MIN_KEY = 16
"""Least characters of a key of a server that other machines reach."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where a server listens, who may ask, and how much.

    Args:
        host: Address to listen at.
        port: Port, 0 to 65,535; 0 takes a free one.
        api_key: Key that clients send as bearer; "" asks for none, which is possible on
            loopback alone.
        served_name: Name of the model.
        max_body_bytes: Most bytes of a request.
        max_prompt_tokens: Most tokens of a prompt; 0 is the bound of the generator.
        max_request_rows: Most texts of a request: prompts times samples.
        max_requests: Most requests at once.
        request_seconds: Longest time of a request in seconds, above 0.
        max_unread_bytes: Most bytes of each text of a stream that wait for a slow
            client.
        drain_seconds: Time in seconds that requests have to finish after SIGTERM.

    Raises:
        ConfigError: A setting is out of range, or a key is missing.

    Example:
        >>> Settings(host="0.0.0.0")
        Traceback (most recent call last):
        zjax.errors.ConfigError: api_key='' is needed with host='0.0.0.0', which other \
machines reach; set ZJAX_API_KEY to a secret of 16 characters or more
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = dataclasses.field(default="", repr=False)
    served_name: str = "model"
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int = 0
    max_request_rows: int = 128
    max_requests: int = 256
    request_seconds: int | float = 600.0
    max_unread_bytes: int = 1 << 20
    drain_seconds: int | float = 30.0

    def __post_init__(self) -> None:
        if problems := [*_problems(self)]:
            raise ConfigError(*problems)

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches the server."""
        return is_loopback(self.host)


def _problems(settings: Settings) -> Iterator[Problem]:
    """Yields the problems of settings."""
    if not settings.is_local and len(settings.api_key) < MIN_KEY:
        problem = f"is needed with host={settings.host!r}, which other machines reach"
        if settings.api_key:
            problem = f"is short for host={settings.host!r}, which other machines reach"
        remedy = f"set {KEY_VARIABLE} to a secret of {MIN_KEY} characters or more"
        # The key itself must not get into a log.
        yield Problem("api_key", "*" * len(settings.api_key), problem, remedy)
    if not settings.api_key.isascii():
        problem, remedy = "has characters beyond ASCII", "use letters and digits"
        yield Problem("api_key", "*" * len(settings.api_key), problem, remedy)
    if not 0 <= settings.port <= 65_535:
        problem, remedy = "is not between 0 and 65535", "use 8000, or 0 for a free one"
        yield Problem("port", settings.port, problem, remedy)
    if not settings.served_name:
        remedy = "write one, such as model"
        yield Problem("served_name", "", "is no name", remedy)
    names = "max_body_bytes", "max_request_rows", "max_requests", "max_unread_bytes"
    for name in names:
        if getattr(settings, name) < 1:
            problem, remedy = "is below 1", "use 1 or more"
            yield Problem(name, getattr(settings, name), problem, remedy)
    if settings.max_prompt_tokens < 0:
        remedy = "use 0 for all that the model takes"
        number = settings.max_prompt_tokens
        yield Problem("max_prompt_tokens", number, "is negative", remedy)
    if not 0 < settings.request_seconds < _MAX_SECONDS:
        problem, remedy = f"is not above 0 and below {_MAX_SECONDS:g}", "use 600"
        yield Problem("request_seconds", settings.request_seconds, problem, remedy)
    if not 0 <= settings.drain_seconds < _MAX_SECONDS:
        problem, remedy = f"is not from 0 to below {_MAX_SECONDS:g}", "use 30"
        yield Problem("drain_seconds", settings.drain_seconds, problem, remedy)


_MAX_SECONDS = 1e6


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
