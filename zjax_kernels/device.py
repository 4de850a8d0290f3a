"""Choice between Hopper kernels and reference, and refusals in one format."""

import functools
import importlib
import logging
import types
from collections.abc import Sequence
from typing import Any

import jax

from zjax_kernels import abstract


def describe(field: str, value: object, problem: str, remedy: str) -> str:
    """Formats an unusable argument as `field=value problem; remedy`.

    Example:
        >>> describe("block", 8, "is not a block size", "use 16")
        'block=8 is not a block size; use 16'
    """
    return f"{field}={value} {problem}; {remedy}"


def invalid(field: str, value: object, problem: str, remedy: str) -> ValueError:
    """Creates the error of an unusable argument.

    Example:
        >>> str(invalid("block", 8, "is not a block size", "use 16"))
        'block=8 is not a block size; use 16'
    """
    return ValueError(describe(field, value, problem, remedy))


def refuse(problems: Sequence[str]) -> None:
    """Raises a ValueError of all problems, one per line, if there are any.

    Example:
        >>> refuse([])
    """
    if problems:
        raise ValueError("\n".join(problems))


_LOG = logging.getLogger("zjax_kernels")
HEAD_SIZES = (64, 96, 128, 256)
"""Channels per head of the attention kernels."""
DTYPES = ("bfloat16", "float16")
"""Dtypes of the arrays of all kernels but quantisation."""
FLOAT8 = "float8_e4m3fn"
"""Dtype of codes and pages of 8 bits that some kernels read."""
NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200."""


def check_implementation(requested: str, *, dtype: str, head_size: int) -> str:
    """Returns `mosaic_gpu` or `reference` for attention of a dtype and head size."""
    problem, remedy = _array_obstacle(dtype, head_size)
    arrays = f"{dtype}, head size {head_size}"
    return choose_implementation(
        requested, "sparse attention", arrays, problem=problem, remedy=remedy
    )


def choose_implementation(
    requested: str, operation: str, arrays: str, *, problem: str, remedy: str
) -> str:
    """Returns `mosaic_gpu` or `reference`; logs each choice of `auto` once.

    `problem` says why the kernels do not support the arrays (empty if supported),
    `remedy` how to help. Unless `auto` is requested, an unusable device raises
    `NotImplementedError` and unusable arrays `ValueError`.
    """
    if requested not in ("auto", "mosaic_gpu", "reference"):
        known = "use auto, mosaic_gpu or reference"
        raise invalid("implementation", requested, "is not an implementation", known)
    # A program that is counted shows what a product costs, on whatever device.
    if requested == "reference" or abstract.is_abstract():
        return "reference"
    device = _device_obstacle(*first_device())
    if requested == "auto":
        device = device or _mesh_obstacle()
        chosen = "reference" if problem or device else "mosaic_gpu"
        _log_choice(operation, chosen, device or problem or arrays)
        return chosen
    if device:
        raise NotImplementedError(_REFUSAL.format(device, "use an H100 or H200"))
    if problem:
        raise ValueError(_REFUSAL.format(problem, remedy))
    return requested


def load_implementation(package: str, name: str) -> types.ModuleType:
    """Imports `reference` or `mosaic_gpu` of a package.

    `mosaic_gpu` is slow to import, as it imports the compiler of kernels.
    """
    return importlib.import_module(f"zjax_kernels.{package}.{name}")


def why_unsupported(
    dtype: str, head_size: int, device: tuple[str, tuple[int, int]] | None = None
) -> str:
    """Returns why a device cannot run the Hopper kernels, or an empty string.

    Example:
        >>> why_unsupported("bfloat16", 64)
        'it needs a Hopper GPU and this is cpu'
    """
    device = first_device() if device is None else device
    return _device_obstacle(*device) or _array_obstacle(dtype, head_size)[0]


_REFUSAL = (
    "implementation=mosaic_gpu cannot run: {}; {}, or use implementation='reference'"
)


def first_device() -> tuple[str, tuple[int, int]]:
    """Returns the platform (`cuda`, `rocm`, `tpu`, `cpu`) and compute capability.

    The capability is (0, 0) on all platforms but `cuda`.
    """
    device: Any = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform, (0, 0)
    # GPUs of AMD have the platform `gpu`, too.
    if "cuda" not in device.client.platform_version:
        return "rocm", (0, 0)
    major, minor = device.compute_capability.split(".")
    return "cuda", (int(major), int(minor))


def dtype_obstacle(*arrays: Any) -> tuple[str, str]:
    """Returns problem and remedy of arrays without one dtype of 16 bits, or nothing."""
    dtypes = {x.dtype.name for x in arrays}
    if len(dtypes) == 1 and dtypes <= set(DTYPES):
        return "", ""
    found = ", ".join(sorted(dtypes))
    return f"it needs {' or '.join(DTYPES)} and the arrays are {found}", "cast them"


def _array_obstacle(dtype, head_size):
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    if dtype not in DTYPES:
        problem = f"it needs bfloat16 or float16 and the arrays are {dtype}"
        return problem, "cast them"
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return (
            f"it needs a head size of {sizes} and this is {head_size}",
            "pad the heads",
        )
    return "", ""


def _mesh_obstacle():
    """Returns a problem where XLA partitions the program over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    # XLA cannot partition a kernel: it would gather the arrays on every device.
    if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return "it is for one device and the compiler splits this program"
    return ""


def _device_obstacle(platform, capability):
    """Returns why a device cannot run the kernels, or an empty string."""
    if platform != "cuda":
        return f"it needs a Hopper GPU and this is {platform}"
    # wgmma instructions exist on compute capability 9.0 alone.
    if capability[0] != 9:
        found = ".".join(map(str, capability))
        return f"it needs compute capability 9.0 and this GPU has {found}"
    return ""


# Cached, so that a choice that every trace makes is logged once.
@functools.cache
def _log_choice(operation, chosen, reason):
    _LOG.warning("%s: %s (%s)", operation, chosen, reason)
