"""The address of process 0."""

import contextlib
import ipaddress
from typing import NamedTuple


class Address(NamedTuple):
    """Where process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """The address as it is written in a config."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same machine can reach it."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def parse_address(text: str) -> Address:
    """Parses `host:port`; an IPv6 address is in brackets.

    Example:
        >>> parse_address("[::1]:5757")
        Address(host='::1', port=5757)
    """
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def bind_address(coordinator: str) -> str | None:
    """The address on which JAX's coordinator listens; None for all interfaces.

    A loopback address is kept, so that no other machine can reach it.

    Example:
        >>> bind_address("127.0.0.1:5757"), bind_address("node1:5757")
        ('127.0.0.1:5757', None)
    """
    is_loopback = bool(coordinator) and parse_address(coordinator).is_loopback
    return coordinator if is_loopback else None
