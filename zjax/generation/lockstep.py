"""Generation by several processes, which write equal texts in equal passes.

A pass runs on the devices of all processes, so that all processes have to run equal
passes in equal order. Every process gives the same prompts; passes depend on these, on
the order of calls and on the number of pages, and on nothing that differs by process.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator

import jax

from zjax.data.prompts import Given
from zjax.errors import Problem
from zjax.generation.engine import Engine
from zjax.generation.sampling import Sampling
from zjax.generation.tickets import Ticket
from zjax.generation.worker import Context, Runner, Served
from zjax.processes.agreement import check_same

_BLOCK = 256
"""Prompts that are compared at once."""


class Lockstep:
    """Runs an engine in the thread of the caller, alike in all processes.

    A `Worker` would take requests as they come, in another order in each process.
    """

    def __init__(self, engine: Engine, context: Context):
        self._runner, self._context = Runner(engine), context

    @property
    def served(self) -> Served:
        """State and totals."""
        return self._runner.served

    def add(self, ticket: Ticket) -> None:
        """Queues a ticket; no pass runs before `wait`."""
        self._runner.admit(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Runs passes until all texts of a ticket have ended."""
        with self._context():
            while self._runner.is_open(ticket):
                self._runner.step()

    def cancel(self, ticket: Ticket) -> None:
        """Ends the texts of a ticket that have not ended."""
        self._runner.abort(ticket)

    def close(self) -> None:
        """Ends all texts."""
        self._runner.close()

    def stop(self) -> None:
        """Does nothing: no thread holds the engine."""


def agreed(
    prompts: Iterable[tuple[Given, list[int]]], sampling: Sampling
) -> Iterator[tuple[Given, list[int]]]:
    """Yields prompts with token ids, or refuses prompts that differ by process."""
    if jax.process_count() == 1:
        yield from prompts
        return
    given, block = iter(prompts), [None]
    while block:
        block = [*itertools.islice(given, _BLOCK)]
        text = json.dumps([ids for _, ids in block])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        check_same({"prompts": digest} | dataclasses.asdict(sampling))
        yield from block


def stream_problems() -> Iterator[Problem]:
    """Yields the problem of requests as they come, in several processes."""
    if jax.process_count() > 1:
        problem = "would read requests in orders of their own"
        remedy = "use generate or generate_each, or start one process"
        yield Problem("processes", jax.process_count(), problem, remedy)
