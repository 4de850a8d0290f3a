"""Worker: the thread that runs an engine, and serves tickets of any thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from zjax.errors import ConfigError, Problem
from zjax.generation.engine import Engine, News
from zjax.generation.scheduler import Metrics
from zjax.generation.sequence import Sequence
from zjax.generation.tickets import Ticket, unreadable, wake

Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context in which passes run, such as the mesh in use."""


class Served(NamedTuple):
    """State of a worker."""

    scheduler: Metrics
    num_written: int
    """Tokens that texts have got so far."""
    num_read: int
    """Tokens of prompts of all requests so far."""


class Runner:
    """Runs the passes of an engine, and hands the news to tickets.

    Args:
        engine: Engine that nothing else uses from here on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._tickets: dict[Sequence, Ticket] = {}
        self._num_written = self._num_read = 0

    @property
    def served(self) -> Served:
        """State and totals, as of some moment of the last pass."""
        metrics = self.engine.scheduler.metrics
        return Served(metrics, self._num_written, self._num_read)

    @property
    def tickets(self) -> set[Ticket]:
        """Tickets with a text that has not ended."""
        return {*self._tickets.values()}

    def is_open(self, ticket: Ticket) -> bool:
        """Whether a text of a ticket has not ended."""
        return any(sequence in self._tickets for sequence in ticket.sequences)

    def admit(self, ticket: Ticket) -> None:
        """Serves a ticket whose sequences the scheduler has found possible."""
        for sequence in ticket.sequences:
            self.engine.scheduler.add(sequence)
            self._tickets[sequence] = ticket
            self._num_read += len(sequence.prompt)

    def abort(self, ticket: Ticket) -> None:
        """Ends the texts of a ticket that have not ended."""
        for sequence in ticket.sequences:
            if self._tickets.pop(sequence, None) is not None:
                self.engine.scheduler.abort(sequence)
                try:
                    ticket.tell(ticket.end(sequence))
                except Exception as error:  # of one text, as in `_add`
                    ticket.tell(unreadable(sequence, error))

    def step(self) -> bool:
        """Waits for the oldest pass, and hands out the news; False without a pass."""
        news = self.engine.step()
        # A wake-up for each token would cost more than the token.
        wake({ticket for each in news or () if (ticket := self._add(each))})
        return news is not None

    def close(self) -> None:
        """Ends all texts."""
        self.engine.close()
        for ticket in self.tickets:
            self.abort(ticket)

    def _add(self, news: News) -> Ticket | None:
        """Adds news to the ticket of the sequence, and ends it at a stop string.

        A text that cannot be decoded ends all texts of the ticket. Returns the ticket;
        None if nobody wants the news any more.
        """
        ticket = self._tickets.get(news.sequence)
        if ticket is None:
            return None
        try:
            delta = ticket.read(news)
        except Exception as error:  # of one text, which ends no text of others
            ticket.tell(unreadable(news.sequence, error))
            self.abort(ticket)
            return None
        self._num_written += len(delta.ids)
        if delta.finish_reason is not None:
            self.engine.scheduler.finish(news.sequence, delta.finish_reason)
            del self._tickets[news.sequence]
        ticket.add(delta)
        return ticket


class Worker:
    """Runs an engine in a thread while there are tickets, which come from any thread.

    Args:
        engine: Engine that no other thread uses from here on.
        context: Context in which the passes run.
    """

    def __init__(self, engine: Engine, context: Context):
        self._runner, self._context = Runner(engine), context
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        # A daemon, so that a forgotten worker does not keep the process.
        self._thread = threading.Thread(target=self._serve, name="zjax-generation")
        self._thread.daemon = True
        self._thread.start()

    @property
    def served(self) -> Served:
        """State and totals, as of some moment of the last pass."""
        return self._runner.served

    def add(self, ticket: Ticket) -> None:
        """Serves a ticket whose sequences the scheduler has found possible."""
        self._orders.put(lambda: self._runner.admit(ticket))
        # The thread may have ended before it saw the order.
        if self._failure is not None:
            ticket.tell(self._failure)

    def wait(self, ticket: Ticket) -> None:
        """Does nothing: the thread runs the passes."""

    def cancel(self, ticket: Ticket) -> None:
        """Ends the texts of a ticket that have not ended."""
        self._orders.put(lambda: self._runner.abort(ticket))

    def close(self) -> None:
        """Ends all texts and the thread."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Asks the thread to end all texts and itself."""
        self._orders.put(None)

    def _serve(self) -> None:
        """Takes orders and runs passes until it is told to end, or fails."""
        try:
            with self._context():
                self._runner.engine.compile()
                runs = False
                while self._take_orders(waits=not runs):
                    runs = self._runner.step()
            self._runner.close()
            problem, remedy = "writes no more texts", "make another"
            self._end(ConfigError(Problem("generator", "closed", problem, remedy)))
        except BaseException as error:  # whatever ends the thread ends all tickets
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Tells all tickets, and all to come, why no pass follows."""
        self._failure = error
        for ticket in self._runner.tickets:
            ticket.tell(error)
        while not self._orders.empty():
            self._refuse(self._orders.get(), error)

    def _take_orders(self, *, waits: bool) -> bool:
        """Carries out all orders, at least one if nothing is left to run."""
        while waits or not self._orders.empty():
            order, waits = self._orders.get(), False
            if order is None:
                return False
            order()
        return True

    def _refuse(self, order: Callable[[], None] | None, error: BaseException) -> None:
        """Carries out an order that comes too late, and tells a new ticket so."""
        known = self._runner.tickets
        if order is not None:
            order()
        for ticket in self._runner.tickets - known:
            ticket.tell(error)
