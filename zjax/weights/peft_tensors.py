"""Tensors of PEFT: adapter matrices, and modules that are trained in full."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.weights.families import FAMILIES
from zjax.weights.tensors import Layout, Row, layouts_of

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDINGS = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
"""Endings of tensor names, by matrix."""


def adapted_kernels(
    names: Collection[str], model: schema.Model, kind: str
) -> dict[str, Layout]:
    """Layouts of kernels with adapters, per layer, from `names` with stacked layers."""
    layouts = layouts_of(FAMILIES[kind].rows, model)
    named = ((ours.replace(".", "/"), layout) for ours, layout in layouts)
    return {ours: x for ours, x in named if _matrix_of(ours, "a")[0] in names}


def adapter_layouts(
    kernels: Mapping[str, Layout], names: Collection[str], rank: int
) -> dict[str, Layout]:
    """Layouts of the adapter matrices of kernels, by array as in `mlp/up/lora/a[0]`."""
    layouts = dict[str, Layout]()
    for ours, kernel in kernels.items():
        # PEFT adapts torch `Linear`s: outputs come first, whatever the kernel has.
        inputs, _, outputs = kernel.row.dims.partition("|")
        # Parts of a joined module share `a`; each part has some rows of `b`.
        parts = {"part": kernel.row.part, "parts": kernel.row.parts}
        rows = {
            "a": Row("", "", f"{inputs} rank", f"rank | {inputs}"),
            "b": Row("", "", f"rank {outputs}", f"{outputs} | rank", **parts),
            "magnitude": Row("", "", outputs, **parts),
        }
        for matrix, row in rows.items():
            stack, index = _matrix_of(ours, matrix)
            if stack in names:
                sizes = {x: {**kernel.sizes, "rank": rank}[x] for x in row.names}
                joined = kernel.joined if row.parts else ()
                tensor = f"{PREFIX}{module_of(kernel)}.{ENDINGS[matrix]}"
                layouts[f"{stack}{index}"] = Layout(row, sizes, joined, {(): tensor})
    return layouts


def _matrix_of(kernel: str, matrix: str) -> tuple[str, str]:
    """Name of an adapter matrix beside a kernel, and the index of the layer."""
    layer, is_kernel, index = kernel.partition("/kernel")
    return (f"{layer}/lora/{matrix}" if is_kernel else ""), index


def module_of(kernel: Layout) -> str:
    """Name of the module with a kernel."""
    return kernel.first.removesuffix(".weight")


def part_error(
    ours: str, kernel: Layout, lora: schema.Lora, kind: str, remedy: str
) -> Exception:
    """Returns the error for an adapter on one part of a joined module."""
    layer = ours.partition("/kernel")[0]
    problem = f"adapts {layer}, a part of {module_of(kernel)} in {kind}"
    return ConfigError(Problem("lora.targets", lora.targets, problem, remedy))


KEY = "modules_to_save"
"""Key of an adapter_config.json for modules that are trained in full."""
WITHOUT = "use an adapter without it"
_TOKENS = "embedding.tokens"
_LAYERS = re.compile(r"^.*\.\d+\.")


def find_saved(
    names: Collection[str], model: schema.Model, kind: str
) -> dict[str, Layout]:
    """Layouts of arrays, layers apart, in modules with some names."""
    return {
        ours: layout
        for ours, layout in layouts_of(FAMILIES[kind].rows, model)
        if any(_holds(names, tensor) for tensor in layout.tensors.values())
    }


def prefixed(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts of fully trained arrays, with the names of PEFT's tensors."""
    return {
        ours: dataclasses.replace(layout, tensors={(): f"{PREFIX}{layout.first}"})
        for ours, layout in layouts.items()
    }


def names_of_trained(lora: schema.Lora, model: schema.Model, kind: str) -> list[str]:
    """Names of the modules with arrays of `lora.also_train`, for `modules_to_save`."""
    layouts = layouts_of(FAMILIES[kind].rows, model)
    trained = (layout.first for ours, layout in layouts if _is_trained(ours, lora))
    return sorted({without_layer(_around(tensor)) for tensor in trained})


def without_layer(module: str) -> str:
    """Name of a module in a layer."""
    return _LAYERS.sub("", module)


def not_apart(
    saved: Mapping[str, Layout], model: schema.Model, adapted: Collection[str]
) -> Iterator[str]:
    """Yields reasons why PEFT cannot train saved modules in full."""
    if model.tied_head and _TOKENS in saved:
        yield "trains an embedding that is the head, too, which PEFT has apart"
    tensors = [layout.first for layout in saved.values()]
    both = [x for x in tensors if _around(x) in adapted]
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
    arrays, found, problems = rows_of_tensors(), set[str](), list[Problem]()
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
            rows = arrays.get(re.sub(r"\.\d+\.", ".{layer}.", tensor, count=1), ())
            ours = [*dict.fromkeys(path_of(x) for x in rows if not x.parts + x.apart)]
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


def rows_of_tensors() -> dict[str, list[Row]]:
    """Rows of all families by tensor."""
    rows = collections.defaultdict[str, list[Row]](list)
    for family in FAMILIES.values():
        for row in family.rows:
            rows[row.theirs].append(row)
    return rows


def path_of(row: Row) -> str:
    """Path of an array in a layer, or in the model for an array outside of layers."""
    return row.ours.removeprefix("blocks.").replace(".", "/")


def _holds(names: Collection[str], tensor: str) -> bool:
    """Whether a tensor lies in a module with a path that ends in one of the names."""
    module = _around(tensor)
    while module:
        if any(module.endswith(name) for name in names):
            return True
        module = _around(module)
    return False


def _around(path: str) -> str:
    """Path of the module around a tensor or a module."""
    return path.rpartition(".")[0]


def _path_of(ours: str) -> str:
    """Path of an array in the model, layers stacked."""
    return ours.partition("[")[0].replace(".", "/")


def _is_trained(ours: str, lora: schema.Lora) -> bool:
    path = _path_of(ours)
    return any(re.search(pattern, path) for pattern in lora.also_train)
