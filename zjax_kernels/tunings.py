"""Tunings that were measured on this kind of GPU: how, and where they are stored."""

import dataclasses
import json
import logging
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")
ROUNDS, CALLS = 5, 10
_LOG = logging.getLogger("zjax_kernels")


class TuningFile(Generic[T]):
    """Tunings by kernel and shape, in a file of the user's cache folder.

    Args:
        name: Name of the file.
        make: Makes a tuning of the fields that the file has, and raises `ValueError` or
            `TypeError` for what is none.
    """

    def __init__(self, name: str, make: Callable[..., T]) -> None:
        self._name, self._make = name, make
        self._read: dict[str, T] | None = None

    @property
    def path(self) -> pathlib.Path:
        """Where the tunings are stored."""
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return pathlib.Path(cache) / "zjax_kernels" / self._name

    def get(self, *key: Any) -> T | None:
        """The tuning of a kernel and shape on this kind of GPU, if it was measured."""
        return self._load().get(_name(key))

    def save(self, best: dict[tuple[Any, ...], T]) -> None:
        """Adds tunings by kernel and shape; warns if the file cannot be written."""
        self.forget()
        found = self._load() | {_name(key): tuning for key, tuning in best.items()}
        fields = {key: dataclasses.asdict(x) for key, x in found.items()}  # pyright: ignore[reportArgumentType]
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
        """Reads the file again when it is next needed."""
        self._read = None

    def _load(self) -> dict[str, T]:
        if self._read is None:
            self._read = self._parse()
        return self._read

    def _parse(self) -> dict[str, T]:
        try:
            found = json.loads(self.path.read_text())
            return {key: self._make(**fields) for key, fields in found.items()}
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            text = "%s cannot be read (%s); delete it and tune again"
            _LOG.warning(text, self.path, error)
            return {}


def _name(key: tuple[Any, ...]) -> str:
    return ", ".join(map(str, (jax.devices()[0].device_kind, *key)))


def rank(
    candidates: Iterable[T], compile_with: Callable[[T], Callable[[], Any]]
) -> list[tuple[T, float]]:
    """Measures tunings, without any that need more shared memory than there is."""
    tried = []
    for tuning in candidates:
        try:
            tried.append((tuning, _seconds(compile_with(tuning))))
        except ValueError as error:
            if "shared memory" not in str(error):
                raise
    return sorted(tried, key=lambda each: each[1])


def _seconds(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(seconds)
