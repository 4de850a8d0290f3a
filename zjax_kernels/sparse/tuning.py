"""Tuning of the kernels: a table for the H200, or what `tune` measured on this GPU."""

import dataclasses
import functools
import json
import logging
import os
import pathlib

import jax

_LOG = logging.getLogger("zjax_kernels")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs; results do not depend on it.

    Args:
        stages: Chunks in shared memory at a time, 1 or more.
        tiles: Tiles in shared memory at a time, 1 or more.
        warpgroup: Whether Mosaic lowers by warpgroup rather than by lane.
    """

    stages: int = 2
    tiles: int = 1
    warpgroup: bool = False


H200 = {
    "forward": {
        64: Tuning(stages=3, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=2),
    },
    "queries": {
        64: Tuning(stages=4, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=1),
    },
    "keys": {
        64: Tuning(stages=4, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=1),
    },
}
"""Tuning by kernel and head size."""


def choose_tuning(kernel: str, head_size: int, *, segmented: bool) -> Tuning:
    """The measured tuning of this kind of GPU, or the shipped one.

    Args:
        kernel: `forward`, `queries` or `keys`.
        head_size: Channels per head: 64, 96, 128 or 256.
        segmented: Whether there are segments, which take shared memory and are not
            tuned.

    Example:
        >>> choose_tuning("forward", 128, segmented=False).stages
        2
    """
    shipped = H200[kernel][head_size]
    if not segmented:
        return _tuned().get(_key(kernel, head_size), shipped)
    lacks_memory = kernel == "queries" and head_size == 128
    return dataclasses.replace(shipped, tiles=1) if lacks_memory else shipped


def _key(kernel, head_size):
    return f"{jax.devices()[0].device_kind}, {kernel}, {head_size}"


def _file() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "zjax_kernels" / "sparse_attention.json"


@functools.cache
def _tuned() -> dict[str, Tuning]:
    path = _file()
    try:
        found = json.loads(path.read_text())
        return {key: _checked(Tuning(**fields)) for key, fields in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("%s cannot be read (%s); delete it and tune again", path, error)
        return {}


def _checked(tuning: Tuning) -> Tuning:
    counts = tuning.stages, tuning.tiles
    if any(not isinstance(count, int) or count < 1 for count in counts):
        raise ValueError(f"{tuning} has a count below 1")
    return tuning


def save_tunings(best: dict[tuple[str, int], Tuning]) -> None:
    """Stores tunings by kernel and head size, if the user's cache is writable."""
    path = _file()
    _tuned.cache_clear()
    found = _tuned() | {_key(*key): tuning for key, tuning in best.items()}
    known = {key: dataclasses.asdict(tuning) for key, tuning in found.items()}
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s); nothing is stored", path, error)
    _tuned.cache_clear()
