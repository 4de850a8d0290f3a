"""JAX's own words name the process that no longer answers, in each of its versions.

What versions write was recorded from two processes, one of which had got SIGSTOP.
"""

import pytest

from zjax.processes.barrier import find_unresponsive

FATAL = (
    "F1128 17:04:58.480939   19407 client.h:80] Terminating process because the JAX "
    "distributed service detected fatal errors. This most likely indicates that "
    "another task died; see the other task logs for more details. Disable Python "
    "buffering, i.e. `python -u`, to be sure to see all the previous output. "
    "absl::Status: "
)
FIRST = f"{FATAL}DEADLINE_EXCEEDED: Deadline Exceeded\n\n"
HEARTBEAT = "RPC: /xla.coordination.CoordinationService/Heartbeat\n"
TRACE = (
    "=== Source Location Trace: ===\n"
    "external/xla+/xla/pjrt/distributed/coordination/coordination_service_error_util"
    ".cc:64\n"
)
OTHER = (
    f"{FATAL}UNAVAILABLE: The following tasks are unhealthy (stopped sending "
    "heartbeats):\n1\nThe tasks have crashed. Check the task logs for an earlier "
    "error, or scheduler events (e.g. preemption, eviction) to debug further.\n\n"
    "RPC: /xla.coordination.CoordinationService/PollForError\n"
)


@pytest.mark.parametrize(
    ("text", "process_id"),
    [
        pytest.param(FIRST + HEARTBEAT, 0, id="jax-0.10-process-0"),
        pytest.param(FIRST + HEARTBEAT + TRACE, 0, id="jax-0.11-process-0"),
        pytest.param(OTHER, 1, id="jax-0.10-process-1"),
        pytest.param(OTHER + TRACE, 1, id="jax-0.11-process-1"),
        pytest.param(f"{FATAL}INTERNAL: out of order\n", None, id="another-error"),
    ],
)
def test_the_process_that_no_longer_answers_is_found(text, process_id):
    """Fails if the process that waited is blamed."""
    assert find_unresponsive(text) == process_id
