"""Finds in JAX's error output which process stopped sending heartbeats."""

import re

_PATTERNS = (
    re.compile(r"Task (\d+) heartbeat timeout"),
    re.compile(r"stopped sending heartbeats\):\s*(\d+)"),
)
_LEADER = re.compile(
    r"Failed to send RPC to coordination service|RPC: /\S+CoordinationService/Heartbeat"
)
"""An RPC to process 0, which runs the service that collects heartbeats, failed."""


def find_unresponsive(text: str) -> int | None:
    """Finds the process that stopped sending heartbeats in a survivor's stderr.

    Returns:
        The number of the process, or None if the text names none.

    Example:
        >>> find_unresponsive("UNAVAILABLE: Task 3 heartbeat timeout.")
        3
    """
    matches = [match for pattern in _PATTERNS if (match := pattern.search(text))]
    if matches:
        return int(matches[0][1])
    return 0 if _LEADER.search(text) else None
