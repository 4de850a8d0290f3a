"""Metrics of a server, in the text format of Prometheus."""

from collections.abc import Callable, Iterator
from typing import Any

from zjax.errors import check_installed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_STATE = (
    ("rows_running", "Texts with a row of the cache.", "num_running"),
    ("rows_waiting", "Texts that wait for a row.", "num_waiting"),
    ("pages_live", "Pages that running texts hold.", "num_live_pages"),
    ("pages_cached", "Pages of earlier texts, found by prefix.", "num_cached_pages"),
)
_TOTALS = (
    ("tokens_read", "Tokens of prompts.", "num_read"),
    ("tokens_written", "Tokens of texts.", "num_written"),
    ("prefix_hit_tokens", "Tokens found in the cache.", "num_hit_tokens"),
    ("preemptions", "Texts that gave up their pages.", "num_preemptions"),
    ("drafts", "Tokens that texts read ahead.", "num_drafts"),
    ("drafts_accepted", "Drafts that were right.", "num_accepted_drafts"),
)


class ServerMetrics:
    """Counts requests and times, and reads the state of the generator.

    Args:
        read_state: Function that returns numbers of the generator by name.
    """

    def __init__(self, read_state: Callable[[], dict[str, int]]):
        check_installed("prometheus_client")
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry, self._read_state = CollectorRegistry(), read_state
        own: dict[str, Any] = {"namespace": "zjax", "registry": self._registry}
        self.requests = Counter(
            "requests",
            "Requests by endpoint and status; 499 is a client that left.",
            ("endpoint", "status"),
            **own,
        )
        self.active = Gauge("requests_active", "Requests being served.", **own)
        self.seconds = Histogram(
            "request_seconds",
            "Seconds of a whole request.",
            buckets=_REQUEST_BUCKETS,
            **own,
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to the first token of a text.",
            buckets=_FIRST_BUCKETS,
            **own,
        )
        self.next_token = Histogram(
            "time_per_output_token_seconds",
            "Seconds from token to token of a text.",
            buckets=_TOKEN_BUCKETS,
            **own,
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yields the state of the generator, all of one moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._read_state()
        for name, text, key in _STATE:
            yield GaugeMetricFamily(f"zjax_{name}", text, value=state[key])
        for name, text, key in _TOTALS:
            yield CounterMetricFamily(f"zjax_{name}", text, value=state[key])

    def write(self) -> bytes:
        """Writes all metrics."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
