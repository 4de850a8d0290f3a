"""Modules that PEFT trains in full beside adapters, its `modules_to_save`.

They are the arrays of `lora.also_train`. As in PEFT a name stands for all modules whose
path ends with it, with all that they hold.
"""

import collections
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from zjax.config import schema
from zjax.errors import ConfigError, Problem
from zjax.huggingface.adapter_tensors import ENDINGS, PREFIX
from zjax.huggingface.families import FAMILIES
from zjax.huggingface.layout import Layout, layouts_of

KEY = "modules_to_save"
"""Key of an adapter_config.json."""
WITHOUT = "use an adapter without it"
_TOKENS = "embedding.tokens"
_LAYERS = re.compile(r"^.*\.\d+\.")


def find_saved(
    names: Collection[str], model: schema.Model, kind: str
) -> dict[str, Layout]:
    """The arrays of a built-in model in modules of some names, layers apart.

    Args:
        names: Ends of paths of modules of its family.
        model: Its settings.
        kind: Its family.

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
    """Name of an array of a saved module in a file of PEFT."""
    return f"{PREFIX}{layout.first}"


def names_of_trained(lora: schema.Lora, model: schema.Model, kind: str) -> list[str]:
    """Names of the modules with arrays of `lora.also_train`, for `modules_to_save`."""
    layouts = layouts_of(FAMILIES[kind].rows, model)
    trained = (layout.first for ours, layout in layouts if _is_trained(ours, lora))
    return sorted({_LAYERS.sub("", _module_of(tensor)) for tensor in trained})


def not_apart(
    saved: Mapping[str, Layout], model: schema.Model, adapted: Collection[str]
) -> Iterator[str]:
    """Yields why modules cannot be trained as PEFT trains them, apart from all others.

    Args:
        saved: Result of `find_saved`.
        model: Settings of the model.
        adapted: Paths of the modules with adapters.
    """
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
    config: schema.Config,
    path: pathlib.Path,
) -> None:
    """Refuses saved modules that a run would not train as PEFT does.

    Args:
        names: The `modules_to_save`.
        saved: Result of `find_saved`.
        config: Read for `lora` and `model`.
        path: The adapter_config.json, for messages.

    Raises:
        ConfigError: Lists the reasons.
    """
    lora, where = config.lora, f"of {path}"
    problems = [
        Problem(KEY, [*names], f"{where} {reason}", WITHOUT)
        for reason in not_apart(saved, config.model, ())
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
    """`lora.also_train` of a directory of PEFT, whose family nothing says.

    Args:
        names: Its `modules_to_save`.
        tensors: Names of its tensors.
        path: Its adapter_config.json, for messages.

    Raises:
        ConfigError: A module has no tensor, or one that is no array of zjax, or one of
            several by family.
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
            ours = arrays.get(re.sub(r"\.\d+\.", ".{layer}.", tensor, count=1), ())
            found.update(f"{array}$" for array in ours)
            if len(ours) != 1:
                what = f"is one of {', '.join(ours)} by family" if ours else "is none"
                problem = f"of {path} has {tensor}, which {what} of the arrays of zjax"
                remedy = "write the settings of lora by hand" if ours else WITHOUT
                problems.append(Problem(KEY, name, problem, remedy))
    if problems:
        raise ConfigError(*problems[:3])
    return tuple(sorted(found))


def _arrays_of_tensors() -> dict[str, list[str]]:
    """Arrays of built-in models by tensor, those that have one to themselves."""
    arrays = collections.defaultdict[str, list[str]](list)
    for family in FAMILIES.values():
        for row in family.rows:
            ours = row.ours.removeprefix("blocks.").replace(".", "/")
            is_alone = not (row.parts or row.apart)
            if is_alone and ours not in arrays[row.theirs]:
                arrays[row.theirs].append(ours)
    return arrays


def _holds(names: Collection[str], tensor: str) -> bool:
    """Whether a tensor is in a module whose path ends with one of the names."""
    module = _module_of(tensor)
    while module:
        if any(module.endswith(name) for name in names):
            return True
        module = _module_of(module)
    return False


def _module_of(path: str) -> str:
    """The path of what holds a tensor or a module."""
    return path.rpartition(".")[0]


def _path_of(ours: str) -> str:
    """The path of an array in the model, layers stacked."""
    return ours.partition("[")[0].replace(".", "/")


def _is_trained(ours: str, lora: schema.Lora) -> bool:
    path = _path_of(ours)
    return any(re.search(pattern, path) for pattern in lora.also_train)
