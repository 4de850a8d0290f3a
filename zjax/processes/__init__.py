"""Several processes as one run: connections, devices, locks and failures."""

from zjax.processes.barrier import explain_timeouts
from zjax.processes.member_files import hold
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
    "explain_timeouts",
    "finish",
    "hold",
    "needs_parent",
    "record_failure",
    "start",
    "supervise",
]
