"""Finds in JAX's error output which process stopped sending heartbeats."""

import re

_PATTERNS = (
    re.compile(r"Task (\d+) heartbeat timeout"),
    re.compile(r"stopped sending heartbeats\):\s*(\d+)"),
)
_LEADER = "Failed to send RPC to coordination service"


def find_unresponsive(text: str) -> int | None:
    """The process that stopped sending heartbeats, from a survivor's stderr, or None.

    Example:
        >>> find_unresponsive("UNAVAILABLE: Task 3 heartbeat timeout.")
        3
    """
    matches = [match for pattern in _PATTERNS if (match := pattern.search(text))]
    if matches:
        return int(matches[0][1])
    return 0 if _LEADER in text else None
