"""Table of the machine as a run sees it, for bug reports."""

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Iterator

import jax

from zjax.errors import ConfigError
from zjax.ops.attention import Implementation, choose_implementation
from zjax.processes.agreement import versions
from zjax.processes.host import host_memory_bytes
from zjax.sharding.describe import format_bytes, render_table
from zjax_kernels.device import first_device

_CUDA_PACKAGES = (
    r"(jax-cuda\d+-plugin|nvidia-(cuda-runtime|cudnn|nccl|cublas)(-cu\d+)?)"
)
_VARIABLES = r"(XLA|JAX|NCCL|CUDA|TF_GPU|LIBTPU|SLURM_(NNODES|NTASKS|PROCID))(_.*)?"
"""Environment variables that matter to a run; other variables stay private."""
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def describe_machine(directory: str | os.PathLike[str] = ".") -> str:
    """Describes software, devices and environment; starts the JAX backend."""
    rows = [
        *_software(),
        *_host(directory),
        *_devices(),
        *_attention(),
        *_environment(),
    ]
    return render_table(("what", "here"), rows)


def _software() -> Iterator[tuple[str, str]]:
    yield "system", f"{_system()}, {platform.machine()}"
    yield from versions().items()


def _system() -> str:
    """Name of the distribution, if known, and of the kernel."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except OSError:
        return kernel


def _host(directory: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields rows on cores, memory and free disk space."""
    cores = os.cpu_count() or 1
    # A container may use fewer cores than the machine has.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    yield "CPU cores", f"{cores}" if usable == cores else f"{usable} of {cores}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text, usable = format_bytes(memory), host_memory_bytes()
    limit = f", limit {format_bytes(usable)}" if usable < memory else ""
    yield "memory", f"{text}{limit}"
    yield "disk free", format_bytes(shutil.disk_usage(directory).free)


def _devices() -> Iterator[tuple[str, str]]:
    """Yields rows on processes, devices, memories and drivers."""
    device = jax.local_devices()[0]
    yield "process", f"{jax.process_index()} of {jax.process_count()}"
    yield "devices", f"{jax.local_device_count()} here of {jax.device_count()} in all"
    kinds = sorted({each.device_kind for each in jax.devices()})
    yield "device kind", ", ".join(kinds)
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield "device memory", f"{format_bytes(stats['bytes_limit'])} usable by JAX"
    memories = [memory.kind for memory in device.addressable_memories()]
    yield "memory kinds", ", ".join(memories)
    yield "platform", " ".join(device.client.platform_version.split())
    if _DRIVER.exists():
        version = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
        yield "NVIDIA driver", version.group() if version else "unknown"
    installed = importlib.metadata.distributions()
    found = {package.metadata["Name"]: package.version for package in installed}
    # A broken installation has no name.
    for name in sorted(filter(None, found)):
        if re.fullmatch(_CUDA_PACKAGES, name):
            yield name, found[name]


def _attention() -> Iterator[tuple[str, str]]:
    for name in ("auto", "cudnn", "xla"):
        yield f"attention {name}", _describe_attention(name)


def _describe_attention(name: Implementation) -> str:
    """Says whether an implementation runs here, or why it does not."""
    platform, capability = first_device()
    try:
        chosen, reason = choose_implementation(
            name,
            platform=platform,
            compute_capability=capability,
            dtype="bfloat16",
            head_size=64,
            lengths=(1024, 1024),
            masked=False,
        )
    except ConfigError as error:
        return error.problems[0].problem
    return f"{chosen} ({reason})" if name == "auto" else "runs here"


def _environment() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if re.fullmatch(_VARIABLES, name):
            yield name, os.environ[name]
