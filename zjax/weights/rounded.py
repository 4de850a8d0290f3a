"""Matrices of a checkpoint with the values of the codes that training learned."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.models.rounded import linear_layers
from zjax.ops.rounding import rounded_kernel
from zjax.settings.quantize import Quantize, Rule
from zjax.sharding.placement import abstract_key
from zjax.typing import Model
from zjax.weights.source import Index, Source


def rounded(
    source: Source, model: Model, settings: Quantize, compute_dtype: str
) -> Source:
    """Returns the arrays of a built-in model; matrices with a rule are rounded.

    Each is rounded whole, in the compute dtype, as training rounds it when a step
    reads it. `model` is the built-in model before rounding, without adapters. Arrays of
    other models keep their values, and the log says so.
    """
    layers = layers_of(model)
    if not layers.keys() <= {_layer_of(name) for name in source.entries}:
        if jax.process_index() == 0:
            text = "stays without effect on the weights of your own model: they are"
            logging.warning("quantize %s read and exported unrounded", text)
        return source
    found: dict[str, tuple[Rule, int, int]] = {}
    for name, entry in source.entries.items():
        path = _layer_of(name)
        layer, rule = layers.get(path), settings.rule_of(path)
        if rule is None or rule.weights == "compute":
            continue
        if layer is not None and path != name:
            num_stacked = len(entry.shape) - layer.num_inputs - layer.num_outputs
            found[name] = rule, layer.num_outputs, num_stacked

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


def layers_of(model: Model) -> dict[str, Any]:
    """Returns the linear layers of a built-in model by path, with shapes alone."""
    shapes, _ = jax.eval_shape(model.init, abstract_key())
    return linear_layers(model.bind(shapes, {}))


def _layer_of(name: str) -> str:
    """Returns the path of a layer by the name of the matrix."""
    # Layers that are stored apart have a number.
    return re.sub(r"/kernel(\[\d+\])?$", "", name)
