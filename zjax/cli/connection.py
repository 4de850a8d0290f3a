"""Connection of the processes that run one command."""

import contextlib
import functools
import sys
from collections.abc import Iterator

from zjax import processes
from zjax.config.check import check_processes
from zjax.run.pinned_pool import limit_pinned_pool
from zjax.settings.schema import Config


@contextlib.contextmanager
def connected(config: Config) -> Iterator[processes.ProcessInfo]:
    """Connects the processes of a run, and disconnects the processes afterwards."""
    check_processes(config)
    if processes.needs_parent(config.processes):
        # orig_argv keeps `-m` and options of the interpreter.
        sys.exit(processes.supervise([sys.executable, *sys.orig_argv[1:]]))
    prepare = functools.partial(limit_pinned_pool, config)
    info = processes.start(config, prepare=prepare)
    if info.process_id == 0 and info.num_processes > 1:
        print(processes.describe_processes(info))
    with processes.explain_timeouts():
        yield info
    # Skipped after an error: peers that failed would never come to the barrier.
    processes.finish(info)
