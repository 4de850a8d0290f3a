"""Writes the experts of gpt-oss as codes of 4 bits, in the layout of OpenAI.

A scale is a power of two for 32 inputs: the smallest one for which no weight is beyond
the last code. Reference: OCP Microscaling Formats, version 1.0.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.ops.rounding import scales_to
from zjax.settings import schema
from zjax.weights.files import cast
from zjax.weights.grid import codes_on_grid, shared_scales
from zjax.weights.source import Entry, Index, Source

NAME = "mxfp4"
KIND = "gpt_oss"
"""Family whose checkpoints have this layout."""
_BLOCK, _LAST, _BIAS = 32, 6.0, 127
_PLAIN = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


def compress(
    source: Source,
    model: schema.Model,
    kind: str,
    *,
    dtype: str = "",
    scales: Source | None = None,
) -> tuple[Source, dict[str, Any]]:
    """Quantises the experts of gpt-oss; see `quantized.compress`."""
    if kind != KIND:
        problem = f"is the layout of {KIND} alone, and this model is of {kind}"
        remedy = "use w4a16, w8a8 or fp8"
        raise ConfigError(Problem("--quantize", NAME, problem, remedy))
    names = [
        name
        for name, entry in source.entries.items()
        if ".experts." in name and len(entry.shape) == 3
    ]
    widths = {source.entries[name].shape[1] for name in names}
    if odd := sorted(x for x in widths if x % _BLOCK):
        problem = f"has blocks of {_BLOCK} inputs, which do not divide {odd[0]}"
        remedy = "leave out --quantize"
        raise ConfigError(Problem("--quantize", NAME, problem, remedy))
    plain = cast(source.without(names), dtype)
    entries, origins = dict[str, Entry](), dict[str, tuple[str, bool]]()
    for name, entry in source.entries.items():
        if name in plain.entries:
            entries[name] = plain.entries[name]
            continue
        experts, inputs, outputs = entry.shape
        blocks = experts, outputs, inputs // _BLOCK
        entries[f"{name}_blocks"] = Entry((*blocks, _BLOCK // 2), "uint8")
        entries[f"{name}_scales"] = Entry(blocks, "uint8")
        origins |= {f"{name}_blocks": (name, False), f"{name}_scales": (name, True)}

    def read(name: str, index: Index) -> np.ndarray:
        if name not in origins:
            return plain.read(name, index)
        origin, is_scale = origins[name]
        _, *whole = (slice(0, n) for n in source.entries[origin].shape)
        experts = index[0], *whole
        given = None if scales is None else scales.read(origin, experts)
        both = encode(origin, source.read(origin, experts), given)
        return both[is_scale][(slice(None), *index[1:])]

    config = {"quant_method": NAME, "modules_to_not_convert": [*_PLAIN]}
    return Source(entries, read), config


def encode(
    name: str, array: np.ndarray, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds matrices to codes and scales.

    Args:
        name: Name for messages.
        array: Plain matrices, [experts, inputs, outputs].
        scales: Scale of each weight of matrices on a grid; None rounds to nearest.

    Returns:
        Codes, uint8[experts, outputs, inputs / 32, 16], the low half of a byte first,
        and exponents plus 127, uint8[experts, outputs, inputs / 32].
    """
    blocks = _in_blocks(array)
    if not np.isfinite(blocks).all():
        problem, remedy = "is not finite everywhere", "export another checkpoint"
        raise CheckpointError(Problem("tensor", name, problem, remedy))
    if scales is None:
        factors = scales_to(np.abs(blocks).max(-1), "mxfp4", np.float32)
        codes = _nearest(blocks / factors[..., np.newaxis])
    else:
        factors = shared_scales(name, _in_blocks(scales))
        if (np.frexp(factors)[0] != 0.5).any():
            problem, remedy = "has a scale that is no power of two", "quantise it again"
            raise CheckpointError(Problem("tensor", name, problem, remedy))
        dtype = str(array.dtype)
        codes = codes_on_grid(name, blocks, factors, _nearest, dtype)
    exponents = np.frexp(factors)[1] - 1
    numbers = codes.astype(jnp.float4_e2m1fn).view(np.uint8) & np.uint8(15)
    packed = numbers[..., ::2] | numbers[..., 1::2] << np.uint8(4)
    return packed, (exponents + _BIAS).astype(np.uint8)


def _in_blocks(array: np.ndarray) -> np.ndarray:
    """Turns [experts, inputs, outputs] to float32[experts, outputs, blocks, 32]."""
    turned = array.astype(np.float32).swapaxes(1, 2)
    return turned.reshape(*turned.shape[:2], -1, _BLOCK)


def _nearest(values: np.ndarray) -> np.ndarray:
    """Rounds to the values of E2M1, as float32."""
    clipped = np.clip(values, -_LAST, _LAST)
    return clipped.astype(jnp.float4_e2m1fn).astype(np.float32)
