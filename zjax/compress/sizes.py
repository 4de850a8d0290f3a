"""Bytes of compressed weights, and the time of a read from memory."""

from typing import NamedTuple

import jax

from zjax.compress.files import FileLayout
from zjax.estimate.device_memory import DeviceMemory, known_memory, named_memory
from zjax.estimate.link_speed import ASSUMED_DEVICE
from zjax.settings.schema import Model, TokenChoice
from zjax.weights.families import FAMILIES
from zjax.weights.files import num_bytes
from zjax.weights.tensors import Layout, layouts_of

_EXPERTS = ".experts."
"""Part of the names of arrays with a matrix or a bias of each expert."""


class Sizes(NamedTuple):
    """Bytes of the weights of a decoder."""

    total: float
    """Bytes of all tensors of the files."""
    read: float
    """Bytes that a decoded token reads: of a mixture, the experts that it chooses."""


def sizes_of(model: Model, layout: FileLayout) -> Sizes:
    """Counts the bytes of the tensors of files, without headers.

    Args:
        model: Settings of the model.
        layout: Tensors of the files.

    Returns:
        Bytes of all tensors, and bytes that a token reads.
    """
    found = {name: num_bytes(x) for name, x in layout.entries.items()}
    endings = {"", *(layout.scheme.endings if layout.scheme else ())}
    idle = dict[str, float]()
    for ours, place in layouts_of(FAMILIES[layout.kind].rows, model):
        if share := _idle_share(ours, model, place):
            idle |= {
                f"{tensor}{ending}": share
                for tensor in place.tensors.values()
                for ending in endings
            }
    total = float(sum(found.values()))
    unread = sum(size * idle.get(name, 0.0) for name, size in found.items())
    return Sizes(total, total - unread)


def _idle_share(ours: str, model: Model, place: Layout) -> float:
    """Returns the share of an array that a decoded token does not read."""
    if ours == "embedding.positions":
        return 1.0
    if ours == "embedding.tokens":
        # The table of a tied model is also the head, which a token reads whole.
        return 0.0 if model.tied_head else 1.0
    if _EXPERTS in ours:
        assert isinstance(model.moe, TokenChoice)
        return 1 - model.moe.top_k / place.sizes["experts"]
    return 0.0


def find_memory(device: str) -> tuple[DeviceMemory, str]:
    """Returns the memory of a device, and the name; "" is the local device.

    Raises:
        ConfigError: The name is unknown.
    """
    kind = device or jax.devices()[0].device_kind
    found = named_memory(device) if device else known_memory(kind)
    if found is None:
        return named_memory(ASSUMED_DEVICE), ASSUMED_DEVICE
    return found, kind


def milliseconds(sizes: Sizes, memory: DeviceMemory) -> float:
    """Returns the least time of a decoded token, as fast as memory allows.

    Example:
        >>> milliseconds(Sizes(5e9, 4e9), DeviceMemory(8e10, 2e12))
        2.0
    """
    return 1e3 * sizes.read / memory.bytes_per_second
