"""Rounds the matrices of one block, given statistics of inputs."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.compress.awq import awq_factors
from zjax.compress.folding import Arrays, Fold, divide_outputs, divided
from zjax.compress.gptq import gptq
from zjax.compress.grid import Grid, Rounded, round_to_nearest
from zjax.compress.smoothquant import smoothquant_factors
from zjax.compress.statistics import Statistics
from zjax.models.recording import Layer
from zjax.settings.compress import Awq, Gptq, Method, Smoothquant


class RoundedBlock(NamedTuple):
    """Parameters of a block with matrices on grids."""

    params: Arrays
    """All parameters of the block by path, float32 where changed."""
    scales: Arrays
    """Scales [groups, M], or [E, groups, M] of experts, by path of the kernel."""


@dataclasses.dataclass(frozen=True)
class BlockLayers:
    """The matrices of a block that rules round.

    Args:
        layers: Matrices with a rule.
        grids: Grid by path of the layer.
        folds: What takes up factors of inputs.
    """

    layers: Sequence[Layer]
    grids: Mapping[str, Grid]
    folds: Sequence[Fold] = ()


def round_block(
    params: Arrays,
    block: BlockLayers,
    method: Method,
    found: Mapping[str, Statistics],
) -> RoundedBlock:
    """Rounds the matrices of a block that are no experts.

    Args:
        params: Parameters of the block by path.
        block: Matrices, grids and folds.
        method: Method of rounding, with settings.
        found: Statistics of the inputs by path of the layer, equal objects for layers
            with equal inputs; not read by round to nearest.

    Returns:
        Parameters with folded factors and matrices on the grids, and scales.
    """
    statistics = dict(found)
    if isinstance(method, Awq | Smoothquant):
        for fold in block.folds:
            params, statistics = _fold(params, block, fold, method, statistics)
    scales: Arrays = {}
    for layers in _sharing(block, statistics):
        params, added = _round_layers(params, layers, block, method, statistics)
        scales |= added
    return RoundedBlock(params, scales)


def matrix_of(params: Mapping[str, Any], layer: Layer) -> Float[Array, "K M"]:
    """Returns a kernel as float32[inputs, outputs]."""
    kernel = jnp.asarray(params[layer.kernel]).astype(jnp.float32)
    num_inputs = functools.reduce(int.__mul__, kernel.shape[: layer.num_inputs], 1)
    return kernel.reshape(num_inputs, -1)


def round_matrix(
    kernel: Float[Array, "K M"],
    grid: Grid,
    method: Method,
    found: Statistics | None,
) -> Rounded:
    """Rounds one matrix by the method, or to nearest without statistics."""
    if isinstance(method, Gptq) and found is not None:
        how: dict[str, Any] = {"activation_order": method.activation_order}
        return gptq(kernel, found.hessian, grid, damp=method.damp, **how)
    return _nearest(kernel, grid)


_nearest = functools.partial(jax.jit, static_argnames="grid")(round_to_nearest)


def _fold(
    params: Arrays,
    block: BlockLayers,
    fold: Fold,
    method: Awq | Smoothquant,
    statistics: dict[str, Statistics],
) -> tuple[Arrays, dict[str, Statistics]]:
    """Moves factors of inputs from the consumers of a fold into the producer."""
    by_path = {layer.path: layer for layer in block.layers}
    consumers = [by_path[path] for path in fold.consumers]
    joined = jnp.concatenate([matrix_of(params, x) for x in consumers], axis=1)
    found, grid = statistics[consumers[0].path], block.grids[consumers[0].path]
    if isinstance(method, Awq):
        shared = found._replace(mean=fold.shared(found.mean))
        factors = awq_factors(joined, shared, grid)
    else:
        factors = smoothquant_factors(joined, found.largest, method.strength)
    params, factors = divide_outputs(params, fold, factors, grid.dtype)
    changed = divided(found, factors)
    for layer in consumers:
        scaled = matrix_of(params, layer) * factors[:, None]
        params[layer.kernel] = scaled.reshape(params[layer.kernel].shape)
    return params, statistics | {layer.path: changed for layer in consumers}


def _sharing(
    block: BlockLayers, statistics: Mapping[str, Statistics]
) -> Iterator[list[Layer]]:
    """Yields layers with equal inputs and one grid, which are rounded at once."""
    groups: dict[Any, list[Layer]] = {}
    for layer in block.layers:
        if not layer.has_experts:
            found = statistics.get(layer.path)
            # By identity; a layer without statistics is alone.
            key = layer.path if found is None else id(found)
            groups.setdefault((key, block.grids[layer.path]), []).append(layer)
    yield from groups.values()


def _round_layers(
    params: Arrays,
    layers: Sequence[Layer],
    block: BlockLayers,
    method: Method,
    statistics: Mapping[str, Statistics],
) -> tuple[Arrays, Arrays]:
    """Rounds the matrices of layers side by side; returns parameters and scales."""
    matrices = [matrix_of(params, layer) for layer in layers]
    grid = block.grids[layers[0].path]
    found = statistics.get(layers[0].path)
    joined = jnp.concatenate(matrices, axis=1)
    rounded = round_matrix(joined, grid, method, found)
    ends, start, scales = dict(params), 0, {}
    for layer, matrix in zip(layers, matrices, strict=True):
        columns = slice(start, start + matrix.shape[1])
        start = columns.stop
        shape = params[layer.kernel].shape
        ends[layer.kernel] = rounded.values[:, columns].reshape(shape)
        scales[layer.kernel] = rounded.scales[:, columns]
    return ends, scales
