"""Tensors of PEFT's layout, and the matrices of adapters that they hold.

Reference: github.com/huggingface/peft, whose `lora_A` is `lora/a`, transposed.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from zjax.config import schema
from zjax.errors import ConfigError, Problem
from zjax.huggingface.families import FAMILIES
from zjax.huggingface.layout import Layout, layouts_of

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of all names of tensors."""
ENDINGS = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
"""Endings of the names of tensors, by matrix."""


class Matrix(NamedTuple):
    """One tensor of PEFT: the module it adapts, and the array that it holds.

    Args:
        module: Name of the module in the base model.
        layout: Layout of the module's kernel.
        kind: `a`, `b` or `magnitude`.
        ours: Name of the array, of one layer as in `blocks/mlp/up/lora/a[0]`.
    """

    module: str
    layout: Layout
    kind: str
    ours: str


def find_matrices(
    names: Collection[str], config: schema.Config, kind: str, remedy: str
) -> dict[str, Matrix]:
    """The tensors of all adapters of a built-in model, by name.

    Args:
        names: Paths of its arrays, layers stacked.
        config: Read for `model` and `lora`.
        kind: Family of the model.
        remedy: What to do where a module is adapted in part.

    Raises:
        ConfigError: A module of the family joins an adapted matrix with others.
    """
    matrices, problems = dict[str, Matrix](), list[Problem]()
    for ours, layout in layouts_of(FAMILIES[kind].rows, config.model):
        layer, kernel, index = ours.replace(".", "/").partition("/kernel")
        if not kernel or f"{layer}/lora/a" not in names:
            continue
        module = layout.first.removesuffix(".weight")
        if layout.row.parts:
            problem = f"adapts {layer}, a part of {module} in {kind}"
            problems.append(
                Problem("lora.targets", config.lora.targets, problem, remedy)
            )
        for name, ending in ENDINGS.items():
            if f"{layer}/lora/{name}" in names:
                matrices[f"{PREFIX}{module}.{ending}"] = Matrix(
                    module, layout, name, f"{layer}/lora/{name}{index}"
                )
    if problems:
        raise ConfigError(problems[0])
    return matrices


def to_tensor(matrix: Matrix, x: np.ndarray) -> np.ndarray:
    """A matrix in two dims, outputs first, or a vector."""
    if matrix.kind == "a":
        return x.reshape(-1, x.shape[-1]).T
    return x.reshape(x.shape[0], -1).T if matrix.kind == "b" else x.reshape(-1)


def tensor_shape(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `to_tensor` of an array."""
    if matrix.kind == "a":
        return shape[-1], math.prod(shape[:-1])
    outputs = shape[1:] if matrix.kind == "b" else shape
    return (math.prod(outputs), *shape[: len(shape) - len(outputs)])


def from_tensor(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_tensor`, for an array of a shape."""
    return x.T.reshape(shape)
