"""Many processes as one run: how they meet, which devices are whose, and who died."""

from zjax.processes.gloo import limits_named
from zjax.processes.lock import hold
from zjax.processes.start import (
    ProcessInfo,
    describe_processes,
    finish,
    record_failure,
    start,
)
from zjax.processes.supervise import needs_parent, supervise

__all__ = [
    "ProcessInfo",
    "describe_processes",
    "finish",
    "hold",
    "limits_named",
    "needs_parent",
    "record_failure",
    "start",
    "supervise",
]
