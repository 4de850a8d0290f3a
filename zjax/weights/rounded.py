"""Matrices of a checkpoint with the values of the codes that training learned."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from zjax.models.rounded import rounded_layers
from zjax.ops.rounding import rounded_kernel
from zjax.settings.quantize import Rule
from zjax.sharding.placement import abstract_key
from zjax.typing import Model
from zjax.weights.source import Index, Source


def rounded(source: Source, model: Model, compute_dtype: str) -> Source:
    """Returns the arrays of a built-in model; matrices with a rule are rounded.

    Each is rounded whole, in the compute dtype, as training rounds it when a step
    reads it. Arrays of other models keep their values.
    """
    shapes, _ = jax.eval_shape(model.init, abstract_key())
    layers = rounded_layers(model.bind(shapes, {}))
    found: dict[str, tuple[Rule, int, int]] = {}
    for name, entry in source.entries.items():
        # Layers that are stored apart have a number.
        layer = layers.get(re.sub(r"/kernel(\[\d+\])?$", "", name))
        if layer is not None and "/kernel" in name:
            num_stacked = len(entry.shape) - layer.num_inputs - layer.num_outputs
            found[name] = layer.rounding, layer.num_outputs, num_stacked

    def read(name: str, index: Index) -> np.ndarray:
        if name not in found:
            return source.read(name, index)
        rule, num_outputs, depth = found[name]
        entry = source.entries[name]
        whole = (slice(0, n) for n in entry.shape[depth:])
        kernels = jnp.asarray(source.read(name, (*index[:depth], *whole)))
        kernels = kernels.astype(compute_dtype)
        # Products of float32 have the same codes and scales again, bit for bit.
        dtype = jnp.dtype(entry.dtype)
        values = np.asarray(rounded_kernel(kernels, rule, num_outputs, depth, dtype))
        return values[(*[slice(None)] * depth, *index[depth:])]

    return Source(source.entries, read)
