"""Which implementation runs on which device."""

import functools
import logging
from typing import Any

import jax

from zjax_kernels.errors import invalid

_LOG = logging.getLogger("zjax_kernels")
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("bfloat16", "float16")


def check_implementation(requested: str, *, dtype: str, head_size: int) -> str:
    """Decides what runs; says once what `auto` took.

    Args:
        requested: `auto`, `mosaic_gpu` or `reference`.
        dtype: Name of the dtype of the arrays.
        head_size: Channels per head.

    Returns:
        `mosaic_gpu` or `reference`.

    Raises:
        ValueError: There is no implementation of that name, or not for these arrays.
        NotImplementedError: `mosaic_gpu` was asked for and this device cannot run it.

    Example:
        >>> check_implementation("auto", dtype="float32", head_size=64)
        'reference'
    """
    problem, remedy = _obstacle_of_arrays(dtype, head_size)
    arrays = f"{dtype}, head size {head_size}"
    return choose_implementation(
        requested, "sparse attention", arrays, problem=problem, remedy=remedy
    )


def choose_implementation(
    requested: str, what: str, arrays: str, *, problem: str, remedy: str
) -> str:
    """Decides what runs; says once what `auto` took.

    Args:
        requested: `auto`, `mosaic_gpu` or `reference`.
        what: Is computed.
        arrays: In words.
        problem: Why the kernels cannot take these arrays; empty if they can.
        remedy: Against that.

    Returns:
        `mosaic_gpu` or `reference`.

    Raises:
        ValueError: There is no implementation of that name, or not for these arrays.
        NotImplementedError: `mosaic_gpu` was asked for and this device cannot run it.

    Example:
        >>> choose_implementation("reference", "a sum", "int8", problem="", remedy="")
        'reference'
    """
    if requested not in ("auto", "mosaic_gpu", "reference"):
        known = "use auto, mosaic_gpu or reference"
        raise invalid("implementation", requested, "is none that exists", known)
    if requested == "reference":
        return requested
    device = _obstacle_of_device(*first_device())
    if requested == "auto":
        device = device or _obstacle_of_mesh()
        chosen = "reference" if problem or device else "mosaic_gpu"
        _say(what, chosen, device or problem or arrays)
        return chosen
    if device:
        raise NotImplementedError(_REFUSAL.format(device, "use an H100 or H200"))
    if problem:
        raise ValueError(_REFUSAL.format(problem, remedy))
    return requested


def obstacle(dtype: str, head_size: int) -> str:
    """Why this process cannot run the kernels for Hopper GPUs.

    Args:
        dtype: Name of the dtype of the arrays.
        head_size: Channels per head.

    Returns:
        Words that go on from their name; empty where they run.

    Example:
        >>> obstacle("bfloat16", 64)
        'it needs a Hopper GPU and this is cpu'
    """
    return (
        _obstacle_of_device(*first_device()) or _obstacle_of_arrays(dtype, head_size)[0]
    )


_REFUSAL = (
    "implementation=mosaic_gpu cannot run: {}; {}, or use implementation='reference'"
)


def first_device() -> tuple[str, tuple[int, int]]:
    """What this process computes on.

    Returns:
        Platform, `cuda`, `rocm`, `tpu` or `cpu`, and compute capability, (0, 0) where
        it is none of NVIDIA's.

    Example:
        >>> first_device()
        ('cpu', (0, 0))
    """
    device: Any = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform, (0, 0)
    if "cuda" not in device.client.platform_version:
        return "rocm", (0, 0)
    major, minor = device.compute_capability.split(".")
    return "cuda", (int(major), int(minor))


def _obstacle_of_arrays(dtype, head_size):
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


def _obstacle_of_mesh():
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return "it is for one device and the compiler splits this program"
    return ""


def _obstacle_of_device(platform, capability):
    if platform != "cuda":
        return f"it needs a Hopper GPU and this is {platform}"
    if capability[0] != 9:
        found = ".".join(map(str, capability))
        return f"it needs compute capability 9.0 and this GPU has {found}"
    return ""


@functools.cache
def _say(what, chosen, reason):
    _LOG.warning("%s: %s (%s)", what, chosen, reason)
