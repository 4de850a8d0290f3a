"""Tunings measured on this kind of GPU: timing, and a file in the user's cache."""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")
ROUNDS, CALLS = 5, 10
"""Timed rounds, of which the median counts, and calls per round."""
_LOG = logging.getLogger("zjax_kernels")


class TuningFile(Generic[T]):
    """Tunings by kernel and shape, in a file of the user's cache folder.

    Args:
        name: Name of the file.
        make: Dataclass of a tuning.
        least: Least value of fields that are integers.
    """

    def __init__(
        self, name: str, make: Callable[..., T], least: Mapping[str, int]
    ) -> None:
        self._name, self._make, self._least = name, make, least
        self._read: dict[str, T] | None = None

    @property
    def path(self) -> pathlib.Path:
        """Path of the file."""
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return pathlib.Path(cache) / "zjax_kernels" / self._name

    def get(self, *key: Any) -> T | None:
        """Returns the tuning of a kernel and shape on this kind of GPU, or None."""
        return self._load().get(_name(key))

    def save(self, best: dict[tuple[Any, ...], T]) -> None:
        """Adds tunings, by kernel and shape, to the file; warns if writing fails."""
        # Another process may have added tunings since the last read.
        self.forget()
        found = self._load() | {_name(key): tuning for key, tuning in best.items()}
        fields = {key: dataclasses.asdict(x) for key, x in found.items()}  # pyright: ignore[reportArgumentType]
        # Written beside the file and renamed, so that no reader sees half a file.
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(fields, indent=2) + "\n")
            temporary.replace(self.path)
        except OSError as error:
            text = "%s cannot be written (%s); nothing is stored"
            _LOG.warning(text, self.path, error)
        self.forget()

    def forget(self) -> None:
        """Drops the cached content; the next use reads the file again."""
        self._read = None

    def _load(self) -> dict[str, T]:
        if self._read is None:
            self._read = self._parse()
        return self._read

    def _parse(self) -> dict[str, T]:
        """Returns the tunings of the file; an unreadable file warns and is empty."""
        try:
            found = json.loads(self.path.read_text())
            return {key: self._tuning(**fields) for key, fields in found.items()}
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,  # JSON that is nested too deep
        ) as error:
            text = "%s cannot be read (%s); delete it and tune again"
            _LOG.warning(text, self.path, error)
            return {}

    def _tuning(self, **fields: Any) -> T:
        """Makes a tuning; refuses numbers that are too small, or no integers."""
        tuning = self._make(**fields)
        for name, least in self._least.items():
            value = getattr(tuning, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value} is not an integer >= {least}")
        return tuning


def _name(key: tuple[Any, ...]) -> str:
    return ", ".join(map(str, (jax.devices()[0].device_kind, *key)))


def compiles(
    kernel: Callable[..., Any], arrays: tuple[Any, ...]
) -> Callable[[T], Callable[[], Any]]:
    """Returns a function that compiles a kernel with a tuning, and returns a call."""

    def compile_with(tuning: T) -> Callable[[], Any]:
        run = jax.jit(functools.partial(kernel, tuning=tuning))
        return functools.partial(run.lower(*arrays).compile(), *arrays)

    return compile_with


def rank(
    candidates: Iterable[T], compile_with: Callable[[T], Callable[[], Any]]
) -> list[tuple[T, float]]:
    """Returns tunings and seconds per call, fastest first.

    `compile_with` compiles a kernel with a tuning and returns a call of it. Tunings
    that need more shared memory than the GPU has are dropped.
    """
    tried = []
    for tuning in candidates:
        try:
            tried.append((tuning, _seconds(compile_with(tuning))))
        except ValueError as error:
            # Mosaic raises a plain ValueError where a kernel exceeds shared memory.
            if "shared memory" not in str(error):
                raise
    return sorted(tried, key=lambda each: each[1])


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the seconds of a call: the median of rounds, after a call to warm up."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        # Calls are queued together, so that launches overlap with kernels.
        jax.block_until_ready([call() for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(seconds)
