"""Bytes of compressed weights, and the time of a read from memory."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.compress.parts import parts_of, places_of
from zjax.estimate.device_memory import DeviceMemory, known_memory, named_memory
from zjax.estimate.link_speed import ASSUMED_DEVICE
from zjax.models.block import segments_of
from zjax.models.recording import layers_in
from zjax.models.stack import Decoder
from zjax.settings.compress import Compress
from zjax.settings.schema import Config

_BITS = {"int8": 8, "int4": 4, "int3": 3, "nf4": 4, "float8": 8, "mxfp4": 4}
"""Bits of a code."""


class Sizes(NamedTuple):
    """Bytes of the weights of a decoder."""

    total: float
    read: float
    """Bytes that a decoded token reads, with all experts."""


def sizes_of(
    config: Config,
    decoder: Decoder,
    shapes: Mapping[str, Any],
    settings: Compress | None,
) -> Sizes:
    """Counts the bytes of plain or compressed weights.

    Args:
        config: Settings of the model.
        decoder: Decoder with shapes alone.
        shapes: Shapes of all parameters by path, blocks stacked.
        settings: Rules of compression; None for plain weights.

    Returns:
        Bytes of all weights, with packed codes and scales where a rule rounds.
    """
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    total = float(sum(width * math.prod(x.shape) for x in shapes.values()))
    if settings is not None:
        total -= _saved_bytes(config, decoder, shapes, settings, width)
    table = width * math.prod(shapes["embedding/tokens"].shape)
    # The table of a tied model is also the head, which a token reads whole.
    return Sizes(total, total if config.model.tied_head else total - table)


def _saved_bytes(
    config: Config,
    decoder: Decoder,
    shapes: Mapping[str, Any],
    settings: Compress,
    width: int,
) -> float:
    """Counts the bytes that codes and scales save."""
    saved = 0.0
    segments = segments_of(decoder.blocks)
    for place in places_of(decoder):
        grids = parts_of(settings, config, decoder, place).layers.grids
        for layer in layers_in(segments[place.name]):
            if (grid := grids.get(layer.path)) is None:
                continue
            _, *shape = shapes[f"{place.prefix}{layer.kernel}"].shape
            first = 1 if layer.has_experts else 0
            inputs = math.prod(shape[first : first + layer.num_inputs])
            count = math.prod(shape)
            scale = 1 if grid.weights == "mxfp4" else width
            codes = count * _BITS[grid.weights] / 8
            saved += count * width - codes - count / grid.group_of(inputs) * scale
    return saved


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
