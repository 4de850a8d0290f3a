"""Tensors of PEFT's layout, and the matrices of adapters that they hold.

Reference: github.com/huggingface/peft, whose `lora_A` is `lora/a`, transposed.
"""

import math
from collections.abc import Collection, Iterator
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
    """One tensor of PEFT, or a part of it: the module it adapts, and the array.

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

    @property
    def tensor(self) -> str:
        """Name of the tensor."""
        return f"{PREFIX}{self.module}.{ENDINGS[self.kind]}"


def find_matrices(
    names: Collection[str], model: schema.Model, kind: str
) -> Iterator[Matrix]:
    """Yields the matrices of all adapters of a built-in model.

    Args:
        names: Paths of its arrays, layers stacked.
        model: Its settings.
        kind: Its family.
    """
    for ours, layout in layouts_of(FAMILIES[kind].rows, model):
        layer, kernel, index = ours.replace(".", "/").partition("/kernel")
        if not kernel or f"{layer}/lora/a" not in names:
            continue
        module = layout.first.removesuffix(".weight")
        for name in ENDINGS:
            if f"{layer}/lora/{name}" in names:
                yield Matrix(module, layout, name, f"{layer}/lora/{name}{index}")


def part_error(matrix: Matrix, lora: schema.Lora, kind: str, remedy: str) -> Exception:
    """The error of a matrix that is a part of a module of a family.

    Args:
        matrix: The matrix.
        lora: Read for `targets`.
        kind: The family.
        remedy: What to do.
    """
    layer = matrix.ours.partition("/lora/")[0]
    problem = f"adapts {layer}, a part of {matrix.module} in {kind}"
    return ConfigError(Problem("lora.targets", lora.targets, problem, remedy))


def to_tensor(matrix: Matrix, x: np.ndarray) -> np.ndarray:
    """A matrix in two dims, outputs first, or a vector."""
    if matrix.kind == "a":
        return x.reshape(-1, x.shape[-1]).T
    return x.reshape(x.shape[0], -1).T if matrix.kind == "b" else x.reshape(-1)


def tensor_shape(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor of an array."""
    if matrix.kind == "a":
        return shape[-1], math.prod(shape[:-1])
    outputs = shape[1:] if matrix.kind == "b" else shape
    size = sum(matrix.layout.joined) or math.prod(outputs)
    return (size, *shape[: len(shape) - len(outputs)])


def from_tensor(matrix: Matrix, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a shape from its tensor, of which it may be a part.

    The parts of a module share `a`, and each has some rows of `b`.
    """
    if matrix.layout.joined and matrix.kind != "a":
        joined, part = matrix.layout.joined, matrix.layout.row.part
        first = sum(joined[:part])
        x = x[first : first + joined[part]]
    return x.T.reshape(shape)
