"""Tensors of PEFT: adapter matrices, and modules that are trained in full."""

import collections
import math
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.huggingface.families import FAMILIES
from zjax.huggingface.layout import Layout, layouts_of
from zjax.settings import schema

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Start of all tensor names."""
ENDINGS = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
"""Endings of tensor names, by matrix."""


class Matrix(NamedTuple):
    """Tensor of PEFT, or part of a tensor: the adapted module, and the array.

    Args:
        module: Name of the module in the base model.
        layout: Layout of the module's kernel.
        kind: `a`, `b` or `magnitude`.
        ours: Name of the array, per layer as in `blocks/mlp/up/lora/a[0]`.
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
    """Yields all adapter matrices, per layer, from `names` with stacked layers."""
    for ours, layout in layouts_of(FAMILIES[kind].rows, model):
        layer, kernel, index = ours.replace(".", "/").partition("/kernel")
        if not kernel or f"{layer}/lora/a" not in names:
            continue
        module = layout.first.removesuffix(".weight")
        for name in ENDINGS:
            if f"{layer}/lora/{name}" in names:
                yield Matrix(module, layout, name, f"{layer}/lora/{name}{index}")


def part_error(matrix: Matrix, lora: schema.Lora, kind: str, remedy: str) -> Exception:
    """Returns the error for an adapter on one part of a joined module."""
    layer = matrix.ours.partition("/lora/")[0]
    problem = f"adapts {layer}, a part of {matrix.module} in {kind}"
    return ConfigError(Problem("lora.targets", lora.targets, problem, remedy))


def to_tensor(matrix: Matrix, x: np.ndarray) -> np.ndarray:
    """Converts a matrix to two dims, outputs first, or a magnitude to a vector."""
    # PEFT stores weights of torch `Linear`s, with outputs first.
    if matrix.kind == "a":
        return x.reshape(-1, x.shape[-1]).T
    return x.reshape(x.shape[0], -1).T if matrix.kind == "b" else x.reshape(-1)


def tensor_shape(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor that holds an array."""
    if matrix.kind == "a":
        return shape[-1], math.prod(shape[:-1])
    outputs = shape[1:] if matrix.kind == "b" else shape
    # A joined module has one tensor `b` for all parts.
    size = sum(matrix.layout.joined) or math.prod(outputs)
    return (size, *shape[: len(shape) - len(outputs)])


def from_tensor(matrix: Matrix, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Extracts an array of a shape from a tensor that may join several parts."""
    # Parts of a module share `a`; each part has some rows of `b`.
    if matrix.layout.joined and matrix.kind != "a":
        joined, part = matrix.layout.joined, matrix.layout.row.part
        first = sum(joined[:part])
        x = x[first : first + joined[part]]
    return x.T.reshape(shape)


KEY = "modules_to_save"
"""Key of an adapter_config.json for modules that are trained in full."""
WITHOUT = "use an adapter without it"
_TOKENS = "embedding.tokens"
_LAYERS = re.compile(r"^.*\.\d+\.")


def find_saved(
    names: Collection[str], model: schema.Model, kind: str
) -> dict[str, Layout]:
    """Layouts of arrays, layers apart, in modules with some names.

    Example:
        >>> [*find_saved(["wte", "ln_f"], schema.Model(), "gpt2")]
        ['embedding.tokens', 'head.norm.scale', 'head.norm.bias']
    """
    return {
        ours: layout
        for ours, layout in layouts_of(FAMILIES[kind].rows, model)
        if any(_holds(names, tensor) for tensor in layout.tensors.values())
    }


def tensor_of(layout: Layout) -> str:
    """Name of the tensor of a fully trained array."""
    return f"{PREFIX}{layout.first}"


def names_of_trained(lora: schema.Lora, model: schema.Model, kind: str) -> list[str]:
    """Names of the modules with arrays of `lora.also_train`, for `modules_to_save`."""
    layouts = layouts_of(FAMILIES[kind].rows, model)
    trained = (layout.first for ours, layout in layouts if _is_trained(ours, lora))
    return sorted({_LAYERS.sub("", _module_of(tensor)) for tensor in trained})


def not_apart(
    saved: Mapping[str, Layout], model: schema.Model, adapted: Collection[str]
) -> Iterator[str]:
    """Yields reasons why PEFT cannot train saved modules in full."""
    if model.tied_head and _TOKENS in saved:
        yield "trains an embedding that is the head, too, which PEFT has apart"
    tensors = [layout.first for layout in saved.values()]
    both = [x for x in tensors if _module_of(x) in adapted]
    joined = [x.first for x in saved.values() if x.row.parts or x.row.apart]
    yield from (f"trains {x}, which has an adapter, too" for x in both[:1])
    yield from (f"trains {x}, which is no array of its own" for x in joined[:1])


def check_saved(
    names: Collection[str],
    saved: Mapping[str, Layout],
    lora: schema.Lora,
    model: schema.Model,
    path: pathlib.Path,
) -> None:
    """Refuses saved modules that a run freezes, or that PEFT trains otherwise."""
    where = f"of {path}"
    problems = [
        Problem(KEY, [*names], f"{where} {reason}", WITHOUT)
        for reason in not_apart(saved, model, ())
    ]
    frozen = dict.fromkeys(_path_of(x) for x in saved if not _is_trained(x, lora))
    if frozen:
        problem = f"freezes {', '.join(frozen)}, which {KEY} {where} trains"
        field = "lora.also_train"
        problems.append(Problem(field, lora.also_train, problem, "name them, too"))
    if problems:
        raise ConfigError(*problems)


def patterns_of_saved(
    names: Collection[str], tensors: Iterable[str], path: pathlib.Path
) -> tuple[str, ...]:
    """Patterns for `lora.also_train` from the saved modules of an adapter.

    An adapter does not name a family: tensor names are looked up in all families.
    """
    arrays, found, problems = _arrays_of_tensors(), set[str](), list[Problem]()
    plain = [
        tensor.removeprefix(PREFIX)
        for tensor in tensors
        if not tensor.endswith(tuple(ENDINGS.values()))
    ]
    for name in names:
        held = [tensor for tensor in plain if _holds([name], tensor)]
        if not held:
            problem = f"of {path} is a module without tensors"
            problems.append(Problem(KEY, name, problem, WITHOUT))
        for tensor in held:
            # The first number is the layer.
            ours = arrays.get(re.sub(r"\.\d+\.", ".{layer}.", tensor, count=1), ())
            found.update(f"{array}$" for array in ours)
            # Families may give one tensor name to different arrays.
            if len(ours) != 1:
                what = f"is one of {', '.join(ours)} by family" if ours else "is none"
                problem = f"of {path} has {tensor}, which {what} of the arrays of zjax"
                remedy = "write the settings of lora by hand" if ours else WITHOUT
                problems.append(Problem(KEY, name, problem, remedy))
    if problems:
        raise ConfigError(*problems[:3])
    return tuple(sorted(found))


def _arrays_of_tensors() -> dict[str, list[str]]:
    """Arrays of all families by tensor, without joined and per-expert tensors."""
    arrays = collections.defaultdict[str, list[str]](list)
    for family in FAMILIES.values():
        for row in family.rows:
            ours = row.ours.removeprefix("blocks.").replace(".", "/")
            is_alone = not (row.parts or row.apart)
            if is_alone and ours not in arrays[row.theirs]:
                arrays[row.theirs].append(ours)
    return arrays


def _holds(names: Collection[str], tensor: str) -> bool:
    """Whether a tensor lies in a module with a path that ends in one of the names."""
    module = _module_of(tensor)
    while module:
        if any(module.endswith(name) for name in names):
            return True
        module = _module_of(module)
    return False


def _module_of(path: str) -> str:
    """Path of the module around a tensor or a module."""
    return path.rpartition(".")[0]


def _path_of(ours: str) -> str:
    """Path of an array in the model, layers stacked."""
    return ours.partition("[")[0].replace(".", "/")


def _is_trained(ours: str, lora: schema.Lora) -> bool:
    path = _path_of(ours)
    return any(re.search(pattern, path) for pattern in lora.also_train)
