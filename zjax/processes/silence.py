"""What the runtime's last words say of the process that it missed."""

import re

_PATTERNS = (
    re.compile(r"Task (\d+) heartbeat timeout"),
    re.compile(r"stopped sending heartbeats\):\s*(\d+)"),
)
_LEADER = "Failed to send RPC to coordination service"


def name_silent(text: str) -> int | None:
    """Finds which process was missed.

    Args:
        text: What a survivor wrote to stderr.

    Returns:
        A process number, or None where the runtime blames nobody.

    Example:
        >>> name_silent("UNAVAILABLE: Task 3 heartbeat timeout.")
        3
    """
    matches = [match for pattern in _PATTERNS if (match := pattern.search(text))]
    if matches:
        return int(matches[0][1])
    return 0 if _LEADER in text else None
