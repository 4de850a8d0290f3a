"""Checks that the processes of a run agree in settings, software and data."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.errors import Problem, ProcessError
from zjax.processes.member_files import name_processes
from zjax.settings.describe import differences
from zjax.settings.mappings import to_mapping
from zjax.settings.schema import Config

PACKAGES = ("zjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_SOURCES = ("zjax", "zjax_kernels")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages in `PACKAGES`, by name.

    Example:
        >>> list(versions())[:1]
        ['python']
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """Hashes the sources of zjax, which may change without a new version."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                # Relative, as hosts may install zjax at different paths.
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


LOCAL = (
    "directory",
    "data.path",
    "checkpoint.init_from",
    "lora.init_from",
    "distill.teacher",
    "rl.prompts",
    "rl.evaluation_prompts",
    "rl.critic.init_from",
    "zero.offload.nvme_paths",
    "processes.coordinator",
    "processes.process_id",
)
"""Settings that may differ between processes: paths, as hosts mount disks at different
places, the process id, and the coordinator address."""
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""JAX options that change numerical results."""
_LOCAL_FLAGS = ("dump", "host_platform_device_count")
"""XLA flags that may differ: dump paths, and the number of simulated devices."""


def check_agreement(config: Config) -> None:
    """Refuses to train with processes that differ in settings or software.

    A collective call; all processes raise equal errors.
    """
    if jax.process_count() > 1:
        _compare(describe_process(config))


def check_same(described: Mapping[str, Any]) -> None:
    """Refuses processes that read other data or prompts, or in another order.

    `described` holds values of JSON, such as the state of a loader. A collective call;
    all processes raise equal errors.
    """
    if jax.process_count() > 1:
        _compare(described)


def _compare(described: Mapping[str, Any]) -> None:
    """Raises the differences between the descriptions of all processes."""
    texts = _gather(json.dumps(described, sort_keys=True).encode())
    if problems := disagreements([json.loads(text) for text in texts]):
        raise ProcessError(*problems)


def describe_process(config: Config) -> dict[str, Any]:
    """Settings, versions, JAX options and XLA flags that all processes must share."""
    settings = to_mapping(config)
    for path in LOCAL:
        *sections, name = path.split(".")
        section = settings
        for inner in sections:
            section = section.get(inner) or {}  # None lacks the setting
        section.pop(name, None)
    # Paths of indexes are local, too; `check_same` compares the checksums.
    for metric in settings["curriculum"]["metrics"]:
        del metric["index"]
    options = {name: getattr(jax.config, name) for name in _JAX_OPTIONS}
    flags = os.environ.get("XLA_FLAGS", "").split()
    return settings | {
        "software": versions() | {"zjax_source": source_digest()},
        "jax": {name: str(value) for name, value in options.items()},
        "XLA_FLAGS": [x for x in flags if not any(word in x for word in _LOCAL_FLAGS)],
    }


def disagreements(by_process: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Compares results of `describe_process`, ordered by process, with process 0.

    Returns one problem per differing value, with the processes that have the value.
    """
    ids_by_value: dict[tuple[str, str], list[int]] = {}
    values: dict[tuple[str, str], tuple[Any, Any]] = {}
    for process_id, described in enumerate(by_process):
        for setting, value, first in differences(described, by_process[0]):
            # By repr, as values such as lists are not hashable.
            key = setting, repr(value)
            ids_by_value.setdefault(key, []).append(process_id)
            values[key] = value, first
    return [
        Problem(
            setting,
            values[setting, text][0],
            f"on {name_processes(ids)} is {values[setting, text][1]!r} on process 0",
            "make all processes the same",
        )
        for (setting, text), ids in ids_by_value.items()
    ]


def _gather(text: bytes) -> list[bytes]:
    """Texts of all processes; only one if all are equal."""
    # Digests first: equal texts, the usual case, are never sent.
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    if (digests == digests[0]).all():
        return [text]
    sizes = multihost_utils.process_allgather(np.array(len(text), np.int32))
    # All-gather needs equal shapes.
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
