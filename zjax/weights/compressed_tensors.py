"""Layout of matrices in compressed-tensors checkpoints, for vLLM and transformers.

A matrix [outputs, inputs] is stored as codes, and as scales per output or per group of
inputs of an output. Codes are symmetric: there is no zero point.

Reference: github.com/vllm-project/compressed-tensors.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.settings.quantize import Weights
from zjax.weights.source import Entry

METHOD = "compressed-tensors"
"""`quant_method` of a config.json."""
_WEIGHTS: Mapping[str, Weights] = {
    "int4": "int4",
    "int8": "int8",
    "float8_e4m3fn": "float8",
}
"""Types of codes by dtype."""
_WORD = 32
"""Bits of an integer that holds packed codes."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Codes of matrices, and what shares a scale.

    Args:
        layout: `format` of a config.json.
        dtype: Dtype of codes: `int4`, `int8` or `float8_e4m3fn`.
        group: Inputs that share a scale; 0 for all inputs of an output.
        rounds_inputs: Whether inputs of products are rounded, with a scale per token.
    """

    layout: str
    dtype: str
    group: int = 0
    rounds_inputs: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers."""
        return self.dtype.startswith("int")

    @property
    def weights(self) -> Weights:
        """Type of the codes, as rules of rounding name it."""
        return _WEIGHTS[self.dtype]

    @property
    def is_packed(self) -> bool:
        """Whether an int32 holds several codes."""
        return self.layout == "pack-quantized"

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return int(jnp.iinfo(self.dtype).bits) if self.is_integer else 8

    @property
    def per_word(self) -> int:
        """Codes of an element of the stored array."""
        return _WORD // self.num_bits if self.is_packed else 1

    @property
    def last(self) -> float:
        """Largest code; the smallest code is the negative."""
        info = jnp.iinfo if self.is_integer else jnp.finfo
        return float(info(jnp.dtype(self.dtype)).max)

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the names of codes, scales and, for packed codes, shapes."""
        return ("_packed", "_scale", "_shape") if self.is_packed else ("", "_scale")

    def num_groups(self, inputs: int) -> int:
        """Scales of an output."""
        return inputs // self.group if self.group else 1

    def fits(self, inputs: int) -> bool:
        """Whether groups divide the inputs of a matrix."""
        return inputs > 0 and (not self.group or inputs % self.group == 0)

    def entries(self, shape: tuple[int, ...], scale_dtype: str) -> tuple[Entry, ...]:
        """Entries that store a matrix, in the order of `endings`."""
        outputs, inputs = shape
        scales = Entry((outputs, self.num_groups(inputs)), scale_dtype)
        if not self.is_packed:
            return Entry(shape, self.dtype), scales
        words = -(-inputs // self.per_word)
        return Entry((outputs, words), "int32"), scales, Entry((2,), "int64")

    def round(self, values: np.ndarray) -> np.ndarray:
        """Rounds quotients of weights and scales to the nearest codes, as float32."""
        values = np.clip(values, -self.last, self.last)
        if self.is_integer:
            return np.rint(values)
        return values.astype(jnp.dtype(self.dtype)).astype(np.float32)

    def store(self, codes: np.ndarray) -> np.ndarray:
        """Turns float32 codes of whole rows into the array of a file."""
        if not self.is_packed:
            return codes.astype(jnp.dtype(self.dtype))
        return pack(codes.astype(np.int8), self.num_bits)

    def restore(self, stored: np.ndarray, inputs: int) -> np.ndarray:
        """Turns whole rows of a file into float32 codes."""
        if self.is_packed:
            stored = unpack(stored, self.num_bits, inputs)
        return stored.astype(np.float32)

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Content of `quantization_config`; `ignore` names plain modules."""
        shared = {
            "num_bits": self.num_bits,
            "type": "int" if self.is_integer else "float",
            "symmetric": True,
        }
        strategy = "group" if self.group else "channel"
        weights = {
            **shared,
            "strategy": strategy,
            "group_size": self.group or None,
            "dynamic": False,
            "actorder": None,
        }
        inputs = {**shared, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if self.rounds_inputs else None,
            "output_activations": None,
            "format": self.layout,
        }
        return {
            "quant_method": METHOD,
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*ignore],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


SCHEMES: Mapping[str, Scheme] = {
    "w4a16": Scheme("pack-quantized", "int4", group=128),
    "w8a8": Scheme("int-quantized", "int8", rounds_inputs=True),
    "fp8": Scheme("float-quantized", "float8_e4m3fn", rounds_inputs=True),
}
"""Schemes by the names that vLLM's users know."""

_DTYPES = {
    ("pack-quantized", "int", 4): "int4",
    ("pack-quantized", "int", 8): "int8",
    ("int-quantized", "int", 8): "int8",
    ("float-quantized", "float", 8): "float8_e4m3fn",
}
"""Dtypes of codes that zjax reads, by layout, type and bits."""
FIXED: Mapping[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
"""Accepted values of keys of `quantization_config`; the first is the default."""
KNOWN = frozenset({"format", "config_groups", "ignore", "global_compression_ratio"})
"""Further keys with a known meaning; tensors tell which modules are plain."""
_GROUPS = "config_groups"


def unread_parts(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields keys and values of a `quantization_config` that zjax does not read."""
    groups = found.get(_GROUPS)
    pairs = [*groups.items()] if isinstance(groups, dict) else []
    if len(pairs) != 1 or not isinstance(pairs[0][1], dict):
        yield _GROUPS, groups
        return
    group, prefix = pairs[0][1], f"{_GROUPS}.{pairs[0][0]}"
    weights, layout = group.get("weights"), found.get("format")
    if not isinstance(weights, dict):
        yield f"{prefix}.weights", weights
        return
    if (own := group.get("format")) not in (None, layout):
        yield f"{prefix}.format", own
    kind = layout, weights.get("type", "int"), weights.get("num_bits", 8)
    if not all(isinstance(x, str | int) for x in kind) or kind not in _DTYPES:
        yield "format", kind
    if weights.get("symmetric", True) is not True:
        yield f"{prefix}.weights.symmetric", weights["symmetric"]
    # Codes in another order of inputs come with a further tensor.
    if weights.get("actorder") not in (None, "static", "weight"):
        yield f"{prefix}.weights.actorder", weights["actorder"]
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "group" and type(size) is int and size > 0:
        return
    if strategy != "channel":
        yield f"{prefix}.weights.strategy", (strategy, size)


def scheme_of(found: Mapping[str, Any]) -> Scheme:
    """Scheme of a `quantization_config` without unread parts."""
    (group,) = found[_GROUPS].values()
    weights, layout = group["weights"], found["format"]
    kind = layout, weights.get("type", "int"), weights.get("num_bits", 8)
    size = weights["group_size"] if weights["strategy"] == "group" else 0
    return Scheme(layout, _DTYPES[kind], size, bool(group.get("input_activations")))


def pack(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """Packs signed codes into int32 along the last dim, lowest bits first.

    Args:
        codes: int8[..., N] in [-2**(num_bits - 1), 2**(num_bits - 1)).
        num_bits: Bits of a code: 4 or 8.

    Returns:
        int32[..., ceil(N * num_bits / 32)] of codes + 2**(num_bits - 1); absent codes
        at the end are 0 bits.

    Example:
        >>> hex(pack(np.array([-8, -7, 0, 7], np.int8), 4)[0])
        '0xf810'
    """
    *outer, length = codes.shape
    per_word = _WORD // num_bits
    shifted = (codes.astype(np.int16) + (1 << num_bits - 1)).astype(np.uint8)
    shifted = np.pad(shifted, [*[(0, 0)] * len(outer), (0, -length % per_word)])
    if num_bits == 4:
        shifted = shifted[..., ::2] | shifted[..., 1::2] << 4
    # Bytes of a file are little-endian on every machine that JAX runs on.
    return np.ascontiguousarray(shifted).view("<i4")


def unpack(words: np.ndarray, num_bits: int, length: int) -> np.ndarray:
    """Unpacks `length` signed codes, int8[..., length]; the inverse of `pack`.

    Example:
        >>> unpack(np.array([0xF810], np.int32), 4, 4).tolist()
        [-8, -7, 0, 7]
    """
    codes = np.ascontiguousarray(words).view(np.uint8)
    if num_bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return (codes[..., :length].astype(np.int16) - (1 << num_bits - 1)).astype(np.int8)
